"""The first promise, checked: drafts change the speed, never the text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidar_core.bench.drive import EngineAnswer, answer_all
from tidar_core.engine import Engine
from tidar_core.model.configuration import load_config
from tidar_core.model.dense import dense_model
from tidar_core.model.quantization import read_quantization
from tidar_core.model.sources import ModelSource, find_model, read_json
from tidar_core.model.text_part import KNOWN
from tidar_core.request import DraftMode, SamplingParams

NEAR_TIE = 1e-3  # two best logits closer than this may fall either way between two implementations
MODES: tuple[DraftMode, ...] = ("off", "auto", "full")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many answers of one way of decoding are equal to the reference's to the last token, how many part from it
    where its two best scores nearly tie, and how many are different."""

    way: str
    equal: int
    near_tie: int
    different: int

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def each_way(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: Callable[[DraftMode], SamplingParams],
    batch: int,
    modes: Sequence[DraftMode] = MODES,
) -> Iterator[tuple[str, list[EngineAnswer]]]:
    """The answers by each way of decoding: every draft mode, alone and in batches of `batch` (of all prompts where
    there are fewer). Each way computes its prompts itself: a reused prefix would hide what the batch did to it.
    """
    for mode in modes if engine.info.block_length else MODES[:1]:  # without a drafter there is nothing else
        for size in dict.fromkeys((1, min(batch, len(prompts)))):
            answers: list[EngineAnswer] = []
            for first in range(0, len(prompts), size):
                some = prompts[first : first + size]
                answers += answer_all(engine, some, [params(mode)] * len(some), f"{mode} {size}")
            yield f"{mode}, {'alone' if size == 1 else f'batch of {size}'}", answers


def greedy_params(max_tokens: int, drafts: DraftMode) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, drafts=drafts)


def sampled_params(max_tokens: int, drafts: DraftMode) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.8, top_p=0.95, top_k=50, seed=1234, ignore_eos=True, drafts=drafts
    )


def compare_ways(ways: dict[str, list[list[int]]]) -> list[Comparison]:
    """Every way against the first, token for token; nothing counts as a near tie."""
    expected = next(iter(ways.values()))
    return [
        Comparison(way, same := sum(a == b for a, b in zip(answers, expected, strict=True)), 0, len(answers) - same)
        for way, answers in ways.items()
    ]


def load_reference(source: ModelSource, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """transformers' own model of the same checkpoint, which it also reads itself where it can: else what the engine
    misreads would be in both."""
    model = read_by_transformers(source, dtype)
    return (dense_model(source, dtype) if model is None else model).to(device).eval()


def read_by_transformers(source: ModelSource, dtype: torch.dtype) -> torch.nn.Module | None:
    """None where transformers does not read the checkpoint, or as another model: quantized, a part of a larger model, a
    type of its own, names that it does not know; of a GGUF file, what it leaves out of its header."""
    choices: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}  # what is pickled is never touched
    if source.gguf_file is not None:
        shape = load_config(source)
        if (
            shape.rope_scaling is not None
            or shape.experts is not None
            or (shape.architecture == "llama" and shape.qkv_bias)
        ):
            return None
        choices = {"gguf_file": source.gguf_file}
        if hasattr(transformers, "GgufConfig"):  # where it would leave them packed if it could
            choices["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif (
        read_json(source.directory / "config.json").get("model_type") not in KNOWN
        or read_quantization(source.directory) is not None
    ):
        return None
    auto: Any = AutoModelForCausalLM
    try:
        model, told = auto.from_pretrained(source.directory, dtype=dtype, output_loading_info=True, **choices)
    except (OSError, ValueError, RuntimeError, AssertionError):  # what the engine forgives, as files of other names
        return None
    return None if told["missing_keys"] or told["mismatched_keys"] else model


def _ids(model: torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """[1, tokens], where the model is."""
    return torch.tensor([[*tokens]], device=next(model.parameters()).device)


@torch.inference_mode()
def reference_answers(model: torch.nn.Module, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    """transformers' greedy `generate`, each prompt alone, end of sequence ignored."""
    never = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator,union-attr]
    answers = []
    for prompt in prompts:
        ids = _ids(model, prompt)
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
            eos_token_id=never, pad_token_id=0, repetition_penalty=1.0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@torch.inference_mode()
def compare_with_reference(
    model: torch.nn.Module,
    prompts: Sequence[tuple[int, ...]],
    expected: Sequence[Sequence[int]],
    ways: dict[str, list[list[int]]],
) -> list[Comparison]:
    """Every way against the reference's answers; a first difference is judged by the reference's own logits."""

    def parted_at_a_tie(prompt: tuple[int, ...], ours: Sequence[int], theirs: Sequence[int]) -> bool:
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if same is None or len(ours) != len(theirs):
            return False
        logits: Tensor = model(_ids(model, (*prompt, *theirs[:same]))).logits[0, -1].float()
        best = logits.max()
        return bool(logits[ours[same]] >= best - NEAR_TIE and logits[theirs[same]] >= best - NEAR_TIE)

    comparisons = []
    for way, answers in ways.items():
        equal = [list(ours) == list(theirs) for ours, theirs in zip(answers, expected, strict=True)]
        ties = sum(
            parted_at_a_tie(prompt, ours, theirs)
            for prompt, ours, theirs, same in zip(prompts, answers, expected, equal, strict=True)
            if not same
        )
        comparisons.append(Comparison(way, sum(equal), ties, len(equal) - sum(equal) - ties))
    return comparisons


@dataclass(frozen=True, slots=True)
class ExactResult:
    """One line of `tidar bench exact`: the token rule, what it is compared with, the comparison, and how many drafts
    were verified and how many held. Where none was verified, the line shows nothing about drafts."""

    rule: str
    against: str
    comparison: Comparison
    drafts_verified: int
    drafts_held: int

    def as_record(self) -> dict[str, object]:
        drafts = {"drafts_verified": self.drafts_verified, "drafts_held": self.drafts_held}
        return {"rule": self.rule, "against": self.against, **self.comparison.as_record(), **drafts}


def shows_drafts(results: Sequence[dict[str, object]]) -> bool:
    """Whether under full drafting, for every token rule, some of the verified drafts held and some did not. results:
    records of `ExactResult`."""
    full = [one for one in results if str(one["way"]).startswith("full")]
    return bool(full) and all(0 < int(str(one["drafts_held"])) < int(str(one["drafts_verified"])) for one in full)


def run_exact(
    engine: Engine, model: str, prompts: Sequence[tuple[int, ...]], *, batch: int, max_tokens: int
) -> Iterator[ExactResult]:
    """Greedy and sampled decoding of all prompts in every way; greedy fp32 also against transformers. Each result as
    soon as it is known."""
    for rule, params in (("greedy", greedy_params), ("sampled", sampled_params)):
        reference: torch.nn.Module | None = None
        expected: list[list[int]] = []
        plain: dict[str, list[list[int]]] = {}
        if rule == "greedy" and engine.info.dtype == "float32":
            reference = load_reference(find_model(model), torch.float32, engine.info.device)
            expected = reference_answers(reference, prompts, max_tokens)
        for way, answers in each_way(engine, prompts, partial(params, max_tokens), batch):
            this = {way: [answer.tokens for answer in answers]}
            steps = [step for answer in answers for step in answer.steps]
            drafts = sum(len(step.drafted) for step in steps), sum(step.accepted for step in steps)
            if reference is not None:
                (compared,) = compare_with_reference(reference, prompts, expected, this)
                yield ExactResult(rule, "transformers", compared, *drafts)
            if plain:
                yield ExactResult(rule, "plain decoding", compare_ways(plain | this)[1], *drafts)
            plain = plain or this
