"""Runs requests through an engine, all at once, and keeps what each of them did."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidar_core.engine import Engine
from tidar_core.request import Finish, Request, SamplingParams, StepTrace


@dataclass(slots=True)
class EngineAnswer:
    """tokens: what was emitted. steps: the trace of each step that emitted. finish: how it ended."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def decode_steps(self) -> int:
        """Steps after the one that ended the prefill, whose token does not count in tokens per step."""
        return sum(step.step > 0 for step in self.steps)


def answer_all(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: Iterable[SamplingParams], cache_salt: str = ""
) -> list[EngineAnswer]:
    """The answers to all prompts, decoded as one batch as far as the engine's limits allow. With a salt no answer
    reuses a prefix of another, even of the same prompt; without one they do."""
    answers = {str(index): EngineAnswer() for index in range(len(prompts))}
    for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        salt = f"{cache_salt} {index}" if cache_salt else ""
        engine.submit(Request(str(index), prompt, chosen, cache_salt=salt))
    while engine.has_work:
        for output in engine.step():
            answer = answers[output.request_id]
            answer.tokens += output.tokens
            answer.finish = output.finish
            if output.trace is not None:
                answer.steps.append(output.trace)
    return list(answers.values())


def tokens_per_step(answers: Iterable[EngineAnswer]) -> float:
    """Emitted tokens / decode steps over all answers, the token of each prefill left out."""
    done = [answer for answer in answers if answer.decode_steps]
    steps = sum(answer.decode_steps for answer in done)
    return sum(len(answer.tokens) - 1 for answer in done) / steps if steps else 1.0
