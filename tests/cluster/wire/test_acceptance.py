"""The per-answer figures, under vLLM's names and with vLLM's meaning."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.acceptance import Acceptance, answer_metrics
from tidar_core.request import StepOutput, StepTrace


def step(number: int, drafted: int, accepted: int, cached: int = 0) -> StepOutput:
    """A step that verified `drafted` drafts, of which `accepted` held; the model added one token."""
    trace = StepTrace(
        step=number,
        seconds=0.1,
        drafted=tuple(range(drafted)),
        accepted=accepted,
        anchor=7,
        block=4,
        proposals=(1,),
        used=None,
        verify_rows=drafted + 1,
        mask_rows=4,
        cached=cached,
    )
    return StepOutput("r", tuple(range(accepted + 1)), trace)


def test_figures_of_a_small_answer() -> None:
    acceptance = Acceptance(max_drafts=3)
    for output in (step(0, 0, 0), step(1, 3, 3), step(2, 3, 0), step(3, 0, 0), step(4, 2, 1)):
        acceptance.add(output)
    assert acceptance.speculative_decoding(per_step=True) == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 8,
        "acceptance_histogram": [1, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "3": [1, 0, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
        "per_step_accepted": [3, 0, 1],
        "per_step_drafted": [3, 3, 2],
    }
    assert answer_metrics([acceptance], [9], per_step=False)["tidar"] == {
        "decode_steps": 4,
        "tokens_per_step": (4 + 1 + 1 + 2) / 4,
        "seed": 9,
    }


def test_an_answer_without_drafts() -> None:
    acceptance = Acceptance(max_drafts=0)
    acceptance.add(step(0, 0, 0))
    metrics = answer_metrics([acceptance], [1], per_step=True)
    assert metrics["tidar"] == {"decode_steps": 0, "tokens_per_step": None, "seed": 1}
    assert metrics["speculative_decoding"]["mean_acceptance_length"] == 1.0
    assert metrics["speculative_decoding"]["draft_acceptance_rate"] == 0.0
    assert metrics["speculative_decoding"]["acceptance_histogram"] == [0]


def test_several_choices_have_no_single_acceptance() -> None:
    choices = [Acceptance(3), Acceptance(3)]
    choices[0].add(step(1, 3, 1))
    choices[1].add(step(1, 0, 0))
    metrics = answer_metrics(choices, [1] * len(choices), per_step=False)
    assert metrics["speculative_decoding"] is None
    assert (metrics["tidar"]["tokens_per_step"], metrics["tidar"]["seed"]) == (1.5, 1)
    several = answer_metrics(choices, range(len(choices)), per_step=False)["tidar"]
    assert (several["seed"], several["seeds"]) == (0, list(range(len(choices))))
    assert "seeds" not in metrics["tidar"]


@given(st.lists(st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))))
def test_the_figures_agree_with_each_other(steps: list[tuple[int, int]]) -> None:
    acceptance = Acceptance(max_drafts=5)
    for number, (drafted, accepted) in enumerate(steps):
        acceptance.add(step(number + 1, drafted, accepted))
    figures = acceptance.speculative_decoding(per_step=True)
    rows = figures["acceptance_histogram_by_draft_length"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == sum(n > 0 for n, _ in steps)
    assert sum(held * count for held, count in enumerate(figures["acceptance_histogram"])) == sum(a for _, a in steps)
    assert all(len(row) == int(n) + 1 for n, row in rows.items())
    assert sum(int(n) * sum(row) for n, row in rows.items()) == figures["num_draft_tokens"]
    assert 1 <= figures["mean_acceptance_length"] <= 6
    assert sum(figures["per_step_drafted"]) == figures["num_draft_tokens"]
    assert acceptance.decode_steps == len(steps)
