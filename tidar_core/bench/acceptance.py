"""Tokens per step: what a drafter is worth, apart from any clock."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tidar_core.bench.drive import answer_all, tokens_per_step
from tidar_core.engine import Engine
from tidar_core.engine.draft_policy import most_full
from tidar_core.request import FinishReason, SamplingParams

LOOP_TOKENS, LONGEST_LOOP = 64, 24


@dataclass(frozen=True, slots=True)
class AcceptanceResult:
    """Counts over all answers. tokens_per_step: emitted / decode steps, prefill tokens left out.
    acceptance_by_position: the share of the steps that verified draft i in which it held. ended: answers that ended by
    themselves. looping: answers that repeat themselves at their end, which any drafter guesses well."""

    prompts: int
    tokens: int
    decode_steps: int
    tokens_per_step: float
    acceptance_by_position: tuple[float, ...]
    ended: int
    looping: int

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def measure_acceptance(engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> AcceptanceResult:
    """Answers all prompts under `params` and counts which drafts held. Under full drafting no more prompts run at once
    than may all draft fully."""
    most = max(1, len(prompts))
    if params.drafting == "full":
        block = engine.info.block_length
        most = most_full(min(params.block or block, block), engine.info.full_rows)
    parts = [prompts[first : first + most] for first in range(0, len(prompts), most)]
    answers = [answer for part in parts for answer in answer_all(engine, part, [params] * len(part))]
    steps = [step for answer in answers for step in answer.steps if step.drafted]
    by_position = []
    for draft in range(max((len(step.drafted) for step in steps), default=0)):
        # Where an answer ended within the drafts, nobody knows of those behind its end.
        verified = [s for s in steps if len(s.drafted) > draft and (s.anchor is not None or s.accepted > draft)]
        if not verified:
            break
        by_position.append(sum(step.accepted > draft for step in verified) / len(verified))
    return AcceptanceResult(
        prompts=len(answers),
        tokens=sum(len(answer.tokens) for answer in answers),
        decode_steps=sum(answer.decode_steps for answer in answers),
        tokens_per_step=tokens_per_step(answers),
        acceptance_by_position=tuple(by_position),
        ended=sum(a.finish is not None and a.finish.reason is FinishReason.STOP for a in answers),
        looping=sum(loops(answer.tokens) for answer in answers),
    )


def loops(tokens: Sequence[int]) -> bool:
    """Whether the last `LOOP_TOKENS` tokens are one short run of tokens over and over."""
    end = list(tokens[-LOOP_TOKENS:])
    if len(end) < LOOP_TOKENS:
        return False
    return any(end[period:] == end[:-period] for period in range(1, LONGEST_LOOP + 1))
