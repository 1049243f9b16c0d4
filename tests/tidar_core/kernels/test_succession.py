"""What a step leaves to the next, on tensors: the arithmetic of `tidar_core.layout`, sequence by sequence."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tidar_core.engine.batch import BatchSize, build_batch, inputs_of
from tidar_core.engine.flight import nearest_outcomes, plan_table
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.columns import DRAFTS
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.kernels.succession import Carried
from tidar_core.layout import BlockForm, Shape, count_committed, drafts_left
from tidar_core.request import Request, SamplingParams, Sequence, page_numbers

PAGE, VOCAB = 16, 50
PARAMS = SamplingParams(max_tokens=200)
FORMS = (BlockForm(), BlockForm(slot_0="anchor", labels="shifted"))


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences between two steps: what the first left (committed tokens, anchor, drafts in hand), and the second's
    plans, each of which goes on from one of them."""

    width: int
    left: list[tuple[int, int, list[int]]]
    plans: list[SequencePlan]
    sources: list[int]

    def state(self) -> Tensor:
        rows = [[count, anchor, *hand, *[-1] * (self.width - len(hand))] for count, anchor, hand in self.left]
        return torch.tensor([*rows, [0] * (DRAFTS + self.width)], dtype=torch.int32)


def random_case(seed: int) -> Case:
    """A few of the sequences are gone by the second step, the others may be in another order."""
    draw = random.Random(seed)
    width = draw.choice((0, 1, 3, 7))
    left = [
        (
            draw.randint(1, width + 1),
            draw.randrange(VOCAB),
            [draw.choice((0, draw.randrange(VOCAB))) for _ in range(draw.choice((0, width, draw.randint(0, width))))],
        )
        for _ in range(draw.randint(1, 6))
    ]
    sources = draw.sample(range(len(left)), draw.randint(1, len(left)))
    plans = []
    for number in sources:
        drafts = draw.randint(0, width)
        outcomes = sorted(draw.sample(range(1, drafts + 2), draw.randint(0, drafts + 1))) if width else []
        shape = Shape(drafts, tuple(outcomes), draw.randint(2, width + 1)) if outcomes else Shape(drafts)
        sequence = Sequence(
            Request(str(number), (1,), PARAMS), 0.0, [1], pages=page_numbers(draw.sample(range(1, 90), 4))
        )
        place = draw.randint(0, 4 * PAGE - 2 * width - 4)
        plans.append(SequencePlan(sequence, place, (0,), tuple(range(1, drafts + 1)), shape, emits=True))
    return Case(width, left, plans, sources)


def padded(size: BatchSize) -> BatchSize:
    return BatchSize(size.verify + 3, size.mask + 2, size.verify + 4, size.pages + 1)


def really(case: Case, number: int) -> tuple[SequencePlan, int, list[int], tuple[int, ...]]:
    """A plan's sequence as the host sees it later: its plan, position, verified drafts, and outcomes."""
    plan = case.plans[number]
    committed, _, hand = case.left[case.sources[number]]
    drafts = hand[: plan.shape.drafts]
    outcomes = plan.shape.proposals
    return plan, plan.start + committed, drafts, (min(outcomes[0], len(drafts) + 1), *outcomes[1:]) if outcomes else ()


def carried_rows_match(ops: Ops, seed: int, form: BlockForm) -> None:
    """Rows laid from where the last step began are those that are laid from where it ended."""
    case = random_case(seed)
    batch = build_batch(case.plans, PAGE, padded, form)
    inputs = inputs_of(batch.numbers.clone(), batch.size)
    source = [*case.sources, *[len(case.left)] * (batch.size.sequences - len(case.sources))]
    carried = Carried(case.state(), torch.tensor(source, dtype=torch.int32), nearest_outcomes(batch))
    ops.carry(inputs.rows, inputs.tokens, inputs.repeats, carried, PAGE)

    first, earlier = 0, int(form.slot_0 == "anchor")
    for number in range(len(case.plans)):
        plan, position, _, outcomes = really(case, number)
        start = first
        _, anchor, hand = case.left[case.sources[number]]
        for row, token in enumerate([anchor, *hand, *[0] * case.width][: plan.verify_rows]):
            at = position + row
            assert inputs.tokens[first + row] == token
            assert inputs.rows.positions[first + row] == at
            assert inputs.rows.context_end[first + row] == at + 1
            assert inputs.rows.write_slots[first + row] == plan.sequence.pages[at // PAGE] * PAGE + at % PAGE
        first += plan.verify_rows
        for place, outcome in enumerate(outcomes):
            for slot in range(plan.shape.block):
                row = batch.first_mask_rows[number] + place * plan.shape.block + slot
                assert inputs.rows.positions[row] == position + outcome + slot - earlier
                assert inputs.rows.context_end[row] == position + outcome - earlier
                repeated = start + outcome - 1 if earlier and not slot else -1
                assert inputs.repeats[row - batch.size.verify] == repeated
    untouched = inputs_of(batch.numbers, batch.size)
    assert inputs.rows.positions[first : batch.size.verify].eq(0).all()
    assert inputs.rows.write_slots[first:].lt(PAGE).all()  # padding writes to the trash page
    for name in ("sequence", "tail_start", "tail_end", "page_table"):
        assert torch.equal(getattr(inputs.rows, name), getattr(untouched.rows, name))


def decisions_match(ops: Ops, seed: int) -> None:
    case, draw = random_case(seed), random.Random(seed)
    batch = build_batch(case.plans, PAGE, padded, BlockForm())
    truths: list[int] = []
    for number in range(len(case.plans)):
        plan, _, drafts, _ = really(case, number)
        hand = case.left[case.sources[number]][2]
        likely = [*hand, *[0] * (case.width + 1)][: len(plan.drafts) + 1]
        truths += [token if draw.random() < 0.8 else draw.randrange(-1, VOCAB) for token in likely]
    counts = [plan.shape.block - 1 if plan.shape.proposals else 0 for plan in case.plans]
    drafting = [number for number, plan in enumerate(case.plans) if plan.shape.proposals]
    table = plan_table(batch, len(truths))
    source = torch.tensor(case.sources, dtype=torch.int32)
    decided = ops.decide(torch.tensor(truths), table, case.state(), source, sum(counts), len(drafting))
    before = decided.state.clone()
    picks = [draw.randrange(-1 if draw.random() < 0.2 else 0, VOCAB) for _ in range(sum(counts))]
    if drafting:
        ops.renew(decided, table, torch.tensor(picks))

    assert decided.state[-1].eq(0).all()
    anchors, first, score = [], 0, len(truths)
    for number, count in enumerate(counts):
        plan, _, drafts, outcomes = really(case, number)
        hand = case.left[case.sources[number]][2]
        own, truths = truths[: len(plan.drafts) + 1], truths[len(plan.drafts) + 1 :]
        committed = count_committed(drafts, own)
        anchor = own[committed - 1]
        left = drafts_left(hand, len(drafts), committed, anchor)
        assert before[number].tolist() == [committed, anchor, *left, *[-1] * (case.width - len(left))]
        came = outcomes.index(committed) if committed in outcomes else -1
        assert decided.came[number] == came
        new = [*picks[first : first + count], -1]
        expected = new[: new.index(-1)] if came >= 0 else left
        assert decided.state[number, DRAFTS:].tolist() == [*expected, *[-1] * (case.width - len(expected))]
        start = batch.first_mask_rows[number] + max(came, 0) * plan.shape.block + 1
        assert decided.rows[first : first + count].tolist() == list(range(start, start + count))
        start = score + max(came, 0) * count
        assert decided.scores[first : first + count].tolist() == list(range(start, start + count))
        if count:
            anchors.append(max(anchor, 0))
        first, score = first + count, score + len(outcomes) * count
    assert decided.anchors.tolist() == anchors


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.slot_0)
@pytest.mark.parametrize("seed", range(200))
def test_a_batch_is_carried_to_where_the_last_step_ended(seed: int, form: BlockForm) -> None:
    carried_rows_match(REFERENCE_OPS, seed, form)


@pytest.mark.parametrize("seed", range(200))
def test_what_a_step_decides_is_what_the_host_would(seed: int) -> None:
    decisions_match(REFERENCE_OPS, seed)
