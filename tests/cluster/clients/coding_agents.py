"""Coding agents as their users run them, without a terminal, each with the configuration that a user would write. They
are asked what a file says, and must run the tool that `steered`'s model calls, and send back what that brought."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.cluster.clients.server import Served
from tests.cluster.clients.steered import FILE, FOUND, SECRET

AGENT_SECONDS = 180
HOME = "home"
ASK = f"What does {FILE} say?"
MCP_NOTE = Path(__file__).parent / "mcp_note.py"


@dataclass(frozen=True)
class Run:
    """One way to run an agent: its words, what it finds in its home and its environment, and where the file lies."""

    words: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = FILE


@dataclass(frozen=True)
class Agent:
    """An agent, by the npm package that it is, and how to run it from a directory, by what that shows."""

    package: str
    runs: Mapping[str, Callable[[Served, Path], Run]]


def codex(served: Served, more: str = "") -> Run:
    settings = f"""
        model = "{served.model}"
        model_provider = "tidar"
        [model_providers.tidar]
        name = "TiDAR"
        base_url = "{served.api}"
        env_key = "TIDAR_API_KEY"
        wire_api = "responses"
    """
    words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK]
    return Run(words, {".codex/config.toml": settings + more}, {"TIDAR_API_KEY": served.key})


def codex_with_mcp(served: Served, directory: Path) -> Run:
    note = f"{HOME}/{FILE}"  # where its shell does not look
    server = f"""
        [mcp_servers.notes]
        command = "{sys.executable}"
        args = ["{MCP_NOTE}", "{directory / note}"]
    """
    return replace(codex(served, server), note=note)


def opencode(served: Served, package: str) -> Run:
    options = {"baseURL": served.api, "apiKey": served.key}
    provider = {"npm": package, "name": "TiDAR", "options": options, "models": {served.model: {"reasoning": True}}}
    settings = json.dumps({"provider": {"tidar": provider}})
    return Run(["opencode", "run", "-m", f"tidar/{served.model}", ASK], {".config/opencode/opencode.json": settings})


def qwen_code(served: Served, directory: Path) -> Run:
    told = {"OPENAI_BASE_URL": served.api, "OPENAI_API_KEY": served.key, "OPENAI_MODEL": served.model}
    return Run(["qwen", "--yolo", ASK], environment=told)


def continue_(served: Served, directory: Path) -> Run:
    model = {"name": "TiDAR", "provider": "openai", "model": served.model, "apiBase": served.api, "apiKey": served.key}
    settings = {"name": "tidar", "version": "0.0.1", "schema": "v1", "models": [model | {"capabilities": ["tool_use"]}]}
    # Its YAML has JSON in it.
    words = ["cn", "--config", str(directory / HOME / "config.yaml"), "--auto", "--print", ASK]
    return Run(words, {"config.yaml": json.dumps(settings)})


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("@openai/codex", {"shell": lambda served, _: codex(served), "mcp": codex_with_mcp}),
    "opencode": Agent(
        "opencode-ai",
        {
            "chat": lambda served, _: opencode(served, "@ai-sdk/openai-compatible"),
            "responses": lambda served, _: opencode(served, "@ai-sdk/openai"),
        },
    ),
    "qwen-code": Agent("@qwen-code/qwen-code", {"chat": qwen_code}),
    "continue": Agent("@continuedev/cli", {"chat": continue_}),
}


def found_the_note(run: Run, modules: Path, directory: Path) -> None:
    """Raises where the agent did not come back with the file's word. modules: the node_modules that have it; directory:
    where it works."""
    home = directory / HOME
    home.mkdir()
    for name, text in run.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (directory / run.note).write_text(f"The word is {SECRET}.\n")
    path = os.pathsep.join([str(modules / ".bin"), os.environ["PATH"]])
    done = subprocess.run(
        run.words,
        cwd=directory, env={"PATH": path, "HOME": str(home), **run.environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=AGENT_SECONDS,
    )  # fmt: skip
    if FOUND not in done.stdout:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-1500:]}")
