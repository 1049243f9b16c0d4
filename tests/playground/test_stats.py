"""What the page makes of steps and of metrics, held against Python's own account of the same things."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

from cluster.observe.ingress_metrics import render
from cluster.observe.replica_metrics import ReplicaMetrics, Timing
from cluster.wire.acceptance import Acceptance
from playground.files import read_files
from tests.playground.asking import call
from tidar_core.engine import EngineStats
from tidar_core.engine.step_cost import StepCost
from tidar_core.request import StepOutput, StepTrace


def wire(trace: StepTrace) -> dict[str, Any]:
    """A trace as the API sends it, as far as the numbers go."""
    return {
        "step": trace.step,
        "t_ms": 1000 * trace.seconds,
        "drafted": [{"id": token, "text": str(token)} for token in trace.drafted],
        "accepted": trace.accepted,
        "anchor": None if trace.anchor is None else {"id": trace.anchor, "text": "x"},
        "block": trace.block,
        "proposals": [{"a": outcome} for outcome in trace.proposals],
        "used": trace.used,
        "rows": {"verify": trace.verify_rows, "mask": trace.mask_rows},
    }


@st.composite
def traces(draw: st.DrawFn) -> list[StepTrace]:
    made = []
    for step in range(draw(st.integers(1, 12))):
        drafts = draw(st.integers(0, 5)) if step else 0
        held = draw(st.integers(0, drafts))
        outcomes = tuple(range(1, draw(st.integers(0, drafts + 1)) + 1))
        made.append(
            StepTrace(
                step, 0.02 * step, tuple(range(drafts)), held, 7, 4, outcomes, None, 1 + drafts, 4 * len(outcomes)
            )
        )
    return made


@settings(max_examples=60, deadline=None)
@given(steps=traces())
def test_counts_are_those_of_the_server(blank: Page, steps: list[StepTrace]) -> None:
    server = Acceptance(5)
    for trace in steps:
        server.add(StepOutput("x", tuple(range(trace.accepted + 1)), trace))
    counted = server.speculative_decoding(per_step=False)
    decode = call(blank, "stats.js", "decodeTraces", [{"trace": wire(trace)} for trace in steps])
    assert len(decode) == server.decode_steps
    places = call(blank, "stats.js", "acceptanceByPosition", decode)
    assert sum(place["judged"] for place in places) == counted["num_draft_tokens"]
    assert sum(place["held"] for place in places) == counted["num_accepted_draft_tokens"]
    assert all(place["held"] <= place["judged"] for place in places)
    histogram = call(blank, "stats.js", "tokensPerStep", decode)
    assert sum(histogram) == server.decode_steps
    assert sum(tokens * count for tokens, count in enumerate(histogram)) == server.decode_tokens
    shapes = call(blank, "stats.js", "shapes", decode)
    assert sum(shape["steps"] for shape in shapes) == server.decode_steps
    times = call(blank, "stats.js", "stepTimes", [{"trace": wire(trace)} for trace in steps])
    assert [one["ms"] for one in times] == pytest.approx([20.0] * (len(steps) - 1))


def test_the_gap_between_two_replicas_is_no_step(blank: Page) -> None:
    steps = [{"trace": {**wire(StepTrace(n, 0.02 * n, (), 0, 7, 4, (), None, 1, 0)), "replica": "a"}} for n in range(5)]
    for moved in steps[3:]:
        moved["trace"] |= {"replica": "b", "t_ms": moved["trace"]["t_ms"] + 900}
    times = call(blank, "stats.js", "stepTimes", steps)
    assert [one["ms"] for one in times] == pytest.approx([20.0] * 3)
    assert call(blank, "stats.js", "replicas", steps) == ["a", "b"]


COURSE = """async ([file, answers, counted]) => {
  const tally = new (await import(file)).BurstTally(answers);
  for (const [at, finished] of counted) {
    tally.count(0, { step: 1, accepted: 0, anchor: {}, rows: { verify: 1, mask: 0 } }, finished, at);
  }
  return tally.course;
}"""


@pytest.mark.parametrize(("end", "middles"), [(1300, [0.25, 0.75, 1.15]), (1100, [0.25, 0.8])])
def test_a_burst_does_not_slow_down_at_its_end(blank: Page, end: int, middles: list[float]) -> None:
    """One token every 10 ms to the end, wherever in its half second that is."""
    counted = [(at, at == 800) for at in range(10, end + 1, 10)]
    course = blank.evaluate(COURSE, [f"/playground/{read_files().address}/burst.js", 2, counted])
    assert [part["at"] for part in course] == pytest.approx(middles)
    assert [part["perSecond"] for part in course] == pytest.approx([100] * len(middles), rel=0.05)
    assert [part["active"] for part in course] == [2, 2, 1][: len(middles)]


def test_the_course_of_a_burst_does_not_fall_to_nothing_between_slow_steps(blank: Page) -> None:
    """As those of a large model on a CPU: two seconds each, behind a first token that took three."""
    counted = [(at, False) for at in range(3000, 21_001, 2000)]
    course = blank.evaluate(COURSE, [f"/playground/{read_files().address}/burst.js", 1, counted])
    assert len(course) > 3
    assert [part["perSecond"] for part in course[1:]] == pytest.approx([0.5] * (len(course) - 1), rel=0.25)


CLASSES = """async ([file, verified]) => {
  const tally = new (await import(file)).BurstTally(1, 4);
  for (const verify of verified) {
    tally.count(0, { step: 1, drafted: [], accepted: 0, anchor: {}, rows: { verify, mask: 0 } }, false, 10);
  }
  return [...tally.classes.values()];
}"""


def test_text_that_is_read_again_is_no_part_of_a_burst_s_rows(blank: Page) -> None:
    found = blank.evaluate(CLASSES, [f"/playground/{read_files().address}/burst.js", [1, 480, 4]])
    assert found == [{"steps": 2, "verify": 5, "mask": 0, "tokens": 2}]


AT_ONCE = """async ([file, lengths]) => {
  const tally = new (await import(file)).BurstTally(lengths.length, 4);
  for (let step = 0; step < Math.max(...lengths); step++) {
    for (const [answer, length] of lengths.entries()) {
      const trace = { step, drafted: [], accepted: 0, anchor: {}, rows: { verify: 1, mask: 0 } };
      if (step < length) tally.count(answer, trace, step === length - 1, 10 * step);
    }
  }
  return [...tally.classes].map(([end, { steps }]) => [end, steps]);
}"""


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [([4] * 16, [[16, 48]]), ([2, 4, 2, 4], [[4, 4], [2, 4]]), ([3, 2, 1], [[2, 2], [1, 1]])],
    ids=["all end in one step", "two and two", "one after the other"],
)
def test_answers_that_end_in_one_step_ran_at_once(blank: Page, lengths: list[int], steps: list[list[int]]) -> None:
    found = blank.evaluate(AT_ONCE, [f"/playground/{read_files().address}/burst.js", lengths])
    assert found == steps


def test_text_that_is_read_again_is_no_step_of_the_curve(blank: Page) -> None:
    rows = [1, 480, 4, 2]
    steps = [{"trace": wire(StepTrace(n, 0.02 * n, (), 0, 7, 4, (), None, rows[n], 0))} for n in range(len(rows))]
    assert [one["rows"] for one in call(blank, "stats.js", "stepTimes", steps, 4)] == [4, 2]


SPEED = """async ([file, answers, counted]) => {
  const tally = new (await import(file)).BurstTally(answers);
  for (const [step, at] of counted) {
    tally.count(0, { step, drafted: [], accepted: 0, anchor: {}, rows: { verify: 1, mask: 0 } }, false, at);
  }
  return tally.tokensPerSecond;
}"""


@pytest.mark.parametrize("came", [(50, 150, 250), (50, 50, 100)])
def test_tokens_that_came_before_the_clock_ran_are_no_speed(blank: Page, came: tuple[int, ...]) -> None:
    """Two answers that get a token at each of the times `came`: those behind the first of them count."""
    counted = [(step, at) for step, at in enumerate(came) for _ in range(2)]
    speed = blank.evaluate(SPEED, [f"/playground/{read_files().address}/burst.js", 2, counted])
    behind = sum(at > came[0] for at in came)
    assert speed == pytest.approx(2 * behind / (came[-1] - came[0]) * 1000)


def test_drafts_behind_a_stop_count_as_not_judged(blank: Page) -> None:
    cut = wire(StepTrace(1, 0.1, (1, 2, 3), 1, None, 4, (), None, 4, 0))
    assert call(blank, "stats.js", "acceptanceByPosition", [cut]) == [{"judged": 1, "held": 1}]


def test_answers_of_one_token_have_no_speed(blank: Page) -> None:
    counted = [(0, 50), (0, 60)]
    assert blank.evaluate(SPEED, [f"/playground/{read_files().address}/burst.js", 2, counted]) is None


curves = st.dictionaries(st.integers(1, 200), st.integers(1, 1000), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(curve=curves, rows=st.integers(1, 400))
def test_the_curve_is_read_as_the_policy_reads_it(blank: Page, curve: dict[int, int], rows: int) -> None:
    xs = sorted(curve)
    ys = [float(curve[x]) for x in xs]
    cost = StepCost(tuple(xs), tuple(ys), tuple(ys), tuple(ys))
    assert call(blank, "stats.js", "curveAt", xs, ys, rows) == pytest.approx(cost.trunk_seconds(rows))
    described = {"rows": xs, "trunk_ms": ys, "head_ms": ys, "adapter_ms": ys}
    assert call(blank, "stats.js", "plainStep", described, rows) == pytest.approx(
        cost.trunk_seconds(rows) + cost.head_seconds(rows)
    )
    if rows > 1:
        drafting = call(blank, "stats.js", "draftingStep", described, rows, 3)
        heads = cost.head_seconds(1) + cost.head_seconds(3)
        assert drafting == pytest.approx(cost.trunk_seconds(rows) + cost.adapter_seconds(rows - 1) + heads)


answers = st.text("ab😀", max_size=6)


@settings(max_examples=60, deadline=None)
@given(one=answers, other=answers)
def test_texts_part_where_they_first_differ(blank: Page, one: str, other: str) -> None:
    found = call(blank, "stats.js", "firstDifference", {"text": one, "steps": []}, {"text": other, "steps": []})
    if one == other:
        assert found is None
        return
    at = found["at"]
    assert found["kind"] == "text"
    assert one[:at] == other[:at]
    assert one[at : at + 1] != other[at : at + 1]


names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(replicas=st.dictionaries(names, st.integers(0, 5), min_size=1, max_size=3))
def test_a_metrics_page_is_read_whatever_its_labels_hold(blank: Page, replicas: dict[str, int]) -> None:
    made = {name: ReplicaMetrics("m", name, 4) for name in replicas}
    for name, steps in replicas.items():
        for _ in range(steps):
            made[name].stepped(
                StepOutput("x", (1, 2), StepTrace(1, 0.1, (1,), 1, 2, 4, (1,), 1, 2, 4)), Timing(0.0), 1.0
            )
    page = render(metrics.collect(EngineStats(1, 2, 3, 4)) for metrics in made.values()).decode()
    read = blank.evaluate(READ, [f"/playground/{read_files().address}/prometheus.js", page])
    assert read == [
        [name, {"tokens": 2 * steps, "accepted": steps, "steps": steps, "rows": 6 * steps, "cache": 0.75}]
        for name, steps in replicas.items()
    ]


READ = """async ([file, page]) => {
  const { parseMetrics, byReplica } = await import(file);
  return [...byReplica(parseMetrics(page))].map(([name, { tokens, accepted, steps, rows, cache }]) =>
    [name, { tokens, accepted, steps, rows, cache }]);
}"""


def test_a_replica_that_began_anew_has_no_rate(blank: Page) -> None:
    fields = ("tokens", "drafted", "accepted", "steps", "stepTokens", "rows")
    before, now = dict.fromkeys(fields, 100), dict.fromkeys(fields, 10)
    rates = call(blank, "prometheus.js", "between", before, now, 5)
    assert set(rates.values()) == {None}
    later = {**before, "tokens": 150, "steps": 120, "stepTokens": 150, "rows": 200}
    rates = call(blank, "prometheus.js", "between", before, later, 5)
    assert rates == {"tokensPerSecond": 10, "acceptance": None, "perStep": 2.5, "rowsPerStep": 5}


@pytest.mark.parametrize(
    ("end", "wanted"), [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7, [0, 2, 4, 6, 8]), (130, [0, 50, 100, 150])]
)
def test_axes_have_round_numbers(blank: Page, end: float, wanted: list[float]) -> None:
    assert call(blank, "charts.js", "ticks", end) == wanted
