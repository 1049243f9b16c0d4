"""Commands that measure the default model: each makes sure that nothing failed, and says what it measured."""

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.clients.environments import run
from tests.servers import Server
from tidar_core.config import DEFAULT_MODEL
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer


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


def aiperf(python: str, server: Server, directory: Path) -> str:
    words = [str(Path(python).with_name("aiperf")), "profile", "--ui", "none", "--artifact-dir", str(directory)]
    words += ["--url", server.url, "--endpoint-type", "chat", "--streaming", "--model", DEFAULT_MODEL]
    words += ["--tokenizer", str(tokenizer_files(directory)), "--concurrency", "4", "--request-count", "16"]
    words += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "48"]
    run(words, directory)
    found = json.loads((directory / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 16, found
    return json.dumps({name: found[name]["avg"] for name in ("request_count", "time_to_first_token")})


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
    "vllm": vllm_bench, "guidellm": guidellm, "aiperf": aiperf, "lm-eval": lm_eval,
}  # fmt: skip
