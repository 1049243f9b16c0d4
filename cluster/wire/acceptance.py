"""How well drafts did: counts over the decode steps of one answer, under vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidar_core.request import StepOutput


@dataclass(slots=True)
class Acceptance:
    """Counts of one choice. `max_drafts` is the most drafts that a step can verify (the block length less one).

    Step 0, the prefill that emits the first token, is no decode step. by_length[n][a]: steps that verified n drafts,
    of which a held; steps without drafts are not in it.
    """

    max_drafts: int
    decode_steps: int = 0
    decode_tokens: int = 0
    by_length: dict[int, list[int]] = field(default_factory=dict)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)

    def add(self, output: StepOutput) -> None:
        """Count one step's output."""
        trace = output.trace
        if trace is None or trace.step == 0:
            return
        self.decode_steps += 1
        self.decode_tokens += len(output.tokens)
        drafted = len(trace.drafted)
        if not drafted:
            return
        self.by_length.setdefault(drafted, [0] * (drafted + 1))[trace.accepted] += 1
        self.per_step_drafted.append(drafted)
        self.per_step_accepted.append(trace.accepted)

    def speculative_decoding(self, per_step: bool) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding` (docs/features/speculative_decoding/acceptance_metrics.md there)."""
        drafted, accepted = sum(self.per_step_drafted), sum(self.per_step_accepted)
        steps = len(self.per_step_drafted)
        histogram = [0] * (max(self.max_drafts, *self.by_length, 0) + 1)
        for row in self.by_length.values():
            for held, count in enumerate(row):
                histogram[held] += count
        metrics: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(n): row for n, row in sorted(self.by_length.items())},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.max_drafts,
        }
        if per_step:
            metrics |= {"per_step_accepted": self.per_step_accepted, "per_step_drafted": self.per_step_drafted}
        return metrics


def answer_metrics(
    choices: list[Acceptance], seeds: Sequence[int], per_step: bool, draft_trust: float = 1.0
) -> dict[str, Any]:
    """The `metrics` object of a response: vLLM's figures for a single choice (null for several), and ours for all.

    tokens_per_step is emitted / decode steps, the token of the prefill left out; null where there was no decode step.
    seeds: of each choice. `seed` is the first's; where it does not make all choices anew, `seeds` has each one's
    (several prompts for which no seed was asked). draft_trust is told where drafts had a say in the text.
    """
    steps = sum(choice.decode_steps for choice in choices)
    tokens = sum(choice.decode_tokens for choice in choices)
    own: dict[str, Any] = {
        "decode_steps": steps, "tokens_per_step": tokens / steps if steps else None, "seed": seeds[0],
    }  # fmt: skip
    if len(set(seeds)) > 1:
        own["seeds"] = list(seeds)
    if draft_trust < 1.0:
        own["draft_trust"] = draft_trust
    return {
        "speculative_decoding": choices[0].speculative_decoding(per_step) if len(choices) == 1 else None,
        "tidar": own,
    }
