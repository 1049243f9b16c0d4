"""Who is let in, who gives way, and what of a prompt is kept for others."""

import math
from dataclasses import replace

import pytest

from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.engine.draft_policy import DraftPolicy
from tidar_core.engine.pages import PagePool
from tidar_core.engine.scheduler import Limits, Scheduler
from tidar_core.engine.step_cost import StepCost
from tidar_core.layout import PLAIN, Shape
from tidar_core.prefixes import prefix_marks
from tidar_core.request import Request, SamplingParams, Sequence

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def test_the_marks_of_what_is_cached_are_those_of_the_prompt(tmp_path):
    """By which a router finds the replica that has it; also where it was computed in parts."""
    prompt = tuple(range(100, 300))
    for step_rows in (48, 512):
        chunked = tiny_engine(tmp_path / str(step_rows), step_rows=step_rows)
        answer_all(chunked, [prompt], [replace(GREEDY, max_tokens=1)])
        told, expected = chunked.prefix_marks(99), prefix_marks(prompt, 16, "", 99)
        assert len(expected) == 3 * 8
        assert {told[i : i + 8] for i in range(0, len(told), 8)} == {expected[i : i + 8] for i in range(0, 24, 8)}


def names(sequences):
    return [sequence.request.request_id for sequence in sequences]


def test_nobody_gives_way_to_one_who_would_still_not_fit(tmp_path):
    small = tiny_engine(tmp_path, cache_tokens=8 * 16, max_model_len=128)
    plain = replace(GREEDY, drafts="off")
    small.submit(Request("same", tuple(range(3, 53)), replace(plain, max_tokens=12)))
    small.submit(Request("low", tuple(range(60, 70)), replace(plain, max_tokens=20), priority=5))
    small.step()
    small.submit(Request("big", tuple(range(100, 175)), replace(plain, max_tokens=2)))
    for _ in range(5):
        small.step()
        assert names(small._scheduler.running) == ["same", "low"]
    while small.has_work:
        small.step()


def test_a_long_prompt_of_greater_urgency_leaves_others_a_row(tmp_path):
    engine = tiny_engine(tmp_path, step_rows=16)
    engine.submit(Request("runs", (5, 6, 7), replace(GREEDY, max_tokens=100)))
    for _ in range(5):
        engine.step()
    engine.submit(Request("urgent", tuple(range(3, 303)), replace(GREEDY, max_tokens=5), priority=-1))
    spoke = []
    while "urgent" not in spoke:
        told = [output.request_id for output in engine.step() if output.tokens]
        assert "runs" in told
        spoke += told
    assert spoke.count("runs") == 20, "300 tokens, 15 rows a step"


def test_beside_many_that_decode_prompts_are_still_read(tmp_path):
    assert EngineConfig().known_rows == 512
    assert EngineConfig(max_running=600).known_rows == 1200
    assert EngineConfig(max_running=600, step_rows=16).known_rows == 16
    engine = tiny_engine(tmp_path, max_running=600, max_model_len=32, cache_tokens=600 * 32)
    short = replace(GREEDY, max_tokens=8, drafts="off")
    for number in range(600):
        engine.submit(Request(f"r{number}", (5, 6, 7 + number % 400), short))
    while engine.has_work and len(engine._scheduler.running) < 600:
        engine.step()
    assert engine.has_work, "some were over before all had begun"


def test_who_was_admitted_last_gives_way(tmp_path):
    small = tiny_engine(tmp_path, cache_tokens=6 * 16, max_model_len=96)
    for name in ("first", "second"):
        small.submit(Request(name, tuple(range(3, 23)), replace(GREEDY, max_tokens=60, drafts="off"), cache_salt=name))
    small.step()
    while not small._scheduler.waiting:
        small.step()
    assert (names(small._scheduler.running), names(small._scheduler.waiting)) == (["first"], ["second"])
    assert (small.stats().waiting, small.stats().waiting_since) == (1, None), "its answer has begun"
    small.submit(Request("third", (5, 6, 7), GREEDY, priority=1))
    assert small.stats().waiting_since == small._scheduler.waiting[-1].arrived
    while small.has_work:
        small.step()


def test_what_a_request_computed_itself_is_no_prefix_that_it_found(tmp_path):
    """Preempted in its prompt, it is put back, refused, and comes again to pages of its own."""
    small = tiny_engine(tmp_path, step_rows=16, cache_tokens=128, max_model_len=128)
    plain = replace(GREEDY, max_tokens=3, drafts="off")
    small.submit(Request("long", tuple(range(3, 99)), plain))
    for _ in range(5):
        small.step()
    small.submit(Request("urgent", tuple(range(200, 264)), replace(plain, max_tokens=20), priority=-1))
    cached = {}
    while small.has_work:
        for output in small.step():
            if output.trace is not None:
                cached.setdefault(output.request_id, output.trace.cached)
    assert cached == {"urgent": 0, "long": 0}


TRUTH = 7  # by the model, whatever it is asked


def scheduler_of(pages, **limits):
    """One without a model: pages of four tokens, blocks of four slots, rows that cost nothing."""
    policy = DraftPolicy(4, StepCost((1, 64), (1.0, 1.0), (0.1, 0.1), (0.0, 0.0)))
    room = {"max_running": 4, "known_rows": 16, "max_positions": 64, "page_size": 4, "prompt_seconds": 2.0, **limits}
    return Scheduler(PagePool(pages), policy, Limits(eos_ids=frozenset({2}), **room))


def prompt_rows(scheduler) -> list[int]:
    """Known tokens of the one long prompt, step by step, until all are read."""
    rows = []
    while True:
        plans = scheduler.plan()
        (long,) = [plan for plan in plans if plan.sequence.request.request_id == "long"]
        rows.append(len(long.known))
        commit(scheduler, plans)
        if long.emits:
            return rows


def slow_rows(seconds: float, attending: float = 0.0) -> StepCost:
    """Of a model whose every row takes so long, and so much for each token before it."""
    return StepCost((1, 64), (seconds, 64 * seconds), (0.0, 0.0), (0.0, 0.0), attending=attending)


@pytest.mark.parametrize(
    ("seconds", "rows"), [(0.001, 512), (0.01, 200), (1.0, 64)], ids=["fast", "slow", "slower than prompts may be read"]
)
def test_a_long_prompt_is_read_in_steps_that_are_soon_over(seconds, rows):
    scheduler = scheduler_of(400, max_positions=1600, known_rows=512)
    scheduler.policy.cost = slow_rows(seconds)
    ask(scheduler, "runs", 4)
    commit(scheduler, scheduler.plan())
    ask(scheduler, "long", 1200)
    found = prompt_rows(scheduler)
    assert sum(found) == 1200
    assert found[1:-1] == [rows - (seconds == 0.001)] * len(found[1:-1]), "beside the row of who decodes"


def test_who_comes_behind_a_long_prompt_does_not_wait_for_all_of_it():
    """Where reading is slow: it would be minutes. Else one prompt is read behind the other."""
    for seconds, waits in ((0.01, 2), (0.001, 8)):
        scheduler = scheduler_of(2000, max_positions=5000, known_rows=512)
        scheduler.policy.cost = slow_rows(seconds)
        ask(scheduler, "long", 4000)
        commit(scheduler, scheduler.plan())
        short = ask(scheduler, "short", 190)
        steps = 0
        while len(short.tokens) == 190:
            commit(scheduler, scheduler.plan())
            steps += 1
        assert steps == waits, seconds


def reading(*prompts, pages=4000):
    """A step reads 200 rows; prompts (name, tokens, priority) came one step after the other."""
    scheduler = scheduler_of(pages, max_positions=5000, known_rows=512)
    scheduler.policy.cost = slow_rows(0.01)
    for name, tokens, priority in prompts:
        ask(scheduler, name, tokens, priority)
        commit(scheduler, scheduler.plan())
    return scheduler


def rows_of(plans) -> dict[str, int]:
    return {plan.sequence.request.request_id: len(plan.known) for plan in plans}


def test_a_long_prompt_leaves_rows_to_those_alone_who_gain_by_them():
    scheduler = reading(("long", 4000, 0), ("as long", 4000, 0), ("less urgent", 300, 5))
    assert rows_of(scheduler.plan()) == {"long": 200}, "two that share both end late, and who is less urgent waits"
    ask(scheduler, "short", 150)
    plans = scheduler.plan()
    assert rows_of(plans) == {"long": 100, "short": 100}
    commit(scheduler, plans)
    assert rows_of(scheduler.plan()) == {"long": 150, "short": 50}, "no more than it wants"


def test_rows_are_not_left_to_who_has_some_in_this_step():
    scheduler = reading(("urgent", 4000, 0), ("more urgent", 300, -1))
    assert rows_of(scheduler.plan()) == {"more urgent": 100, "urgent": 100}


def test_who_comes_in_leaves_the_pages_that_prompts_still_need():
    scheduler = reading(("first", 4000, 0), ("second", 1500, 0), pages=1200)
    assert names(scheduler.running) == ["first"], "who has most pages still to take"
    assert rows_of(scheduler.plan()) == {"first": 200}, "who does not fit is left no rows"
    while scheduler.running or scheduler.waiting:
        commit(scheduler, scheduler.plan())
    assert scheduler.preemptions == 0


def test_fewer_rows_are_read_at_once_behind_what_was_cached():
    scheduler = scheduler_of(2000, max_positions=5000, known_rows=512)
    ask(scheduler, "before", 4001, salt="shared", max_tokens=1)
    while scheduler.running or scheduler.waiting:
        commit(scheduler, scheduler.plan())
    scheduler.policy.cost = slow_rows(0.005, attending=5e-6)
    ask(scheduler, "behind", 4800, salt="shared")
    ask(scheduler, "no time left", 4800, salt="shared")
    assert rows_of(scheduler.plan()) == {"behind": 80}, "of 0.025 s each"


def test_without_a_limit_of_time_no_step_is_priced_for_prompts(monkeypatch):
    monkeypatch.delattr(StepCost, "rows_within")
    scheduler = scheduler_of(400, max_positions=1600, known_rows=512, prompt_seconds=math.inf)
    scheduler.policy.cost = slow_rows(1.0)
    ask(scheduler, "long", 1200)
    assert prompt_rows(scheduler) == [512, 512, 176]


def test_rows_beyond_those_measured_are_never_free():
    """Where another program ran while the last points were measured, the curve between them is flat."""
    scheduler = scheduler_of(400, max_positions=1600, known_rows=512)
    scheduler.policy.cost = StepCost((1, 96, 128), (0.1, 1.28, 1.28), (0.0,) * 3, (0.0,) * 3)
    ask(scheduler, "long", 1200)
    assert prompt_rows(scheduler)[:-1] == [200] * 5


def test_fewer_rows_are_read_at_once_far_into_a_prompt():
    scheduler = scheduler_of(800, max_positions=3000, known_rows=512)
    scheduler.policy.cost = slow_rows(0.005, attending=5e-6)
    ask(scheduler, "long", 2400)
    found = prompt_rows(scheduler)
    assert sum(found) == 2400
    assert found[0] == 400
    assert found[:-1] == sorted(found[:-1], reverse=True)
    assert found[-2] < 200


def ask(scheduler, name, tokens, priority=0, salt=None, **params):
    prompt = tuple(range(100, 100 + tokens))
    chosen = replace(GREEDY, **{"drafts": "off", **params})
    sequence = Sequence(Request(name, prompt, chosen, cache_salt=salt or name, priority=priority), 0.0, list(prompt))
    scheduler.add(sequence)
    return sequence


def commit(scheduler, plans):
    return scheduler.commit(plans, [[TRUTH] * (1 + len(plan.drafts)) for plan in plans])


@pytest.mark.parametrize("again", [False, True])
def test_what_cannot_be_picked_behind_drafts_is_asked_again_where_no_step_is_on_its_way(again):
    """The device has gone on from it there, as if it were picked."""
    scheduler = scheduler_of(5)
    sequence = ask(scheduler, "r", 3, drafts="full")
    commit(scheduler, scheduler.plan())
    scheduler.take_drafts(sequence, [TRUTH, TRUTH])
    (plan,) = scheduler.plan()
    (output,) = scheduler.commit([plan], [[TRUTH, -1, -1]], retry_without_drafts=again)
    assert output.tokens == (TRUTH,)
    assert (output.finish is None) is again
    if again:
        assert (len(sequence.tokens), sequence.computed) == (5, 4)


def test_an_urgent_one_goes_on_in_the_very_step_in_which_others_give_way():
    scheduler = scheduler_of(5)
    for name, tokens, priority in (("urgent", 12, 0), ("low", 3, 2), ("lower", 4, 3), ("lowest", 4, 4)):
        ask(scheduler, name, tokens, priority)
    commit(scheduler, scheduler.plan())
    assert names(scheduler.running) == ["urgent", "low", "lower"], "for the last there was no row"
    plans = scheduler.plan()
    assert names(plan.sequence for plan in plans) == ["urgent", "low"]
    assert names(scheduler.waiting) == ["lower", "lowest"]
    assert scheduler.pool.owned == 5


def test_who_does_not_fit_is_not_overtaken_and_holds_nothing():
    scheduler = scheduler_of(4)
    ask(scheduler, "runs", 5)
    commit(scheduler, scheduler.plan())
    big = ask(scheduler, "big", 12)
    ask(scheduler, "small", 1)
    assert names(plan.sequence for plan in scheduler.plan()) == ["runs"]
    assert (names(scheduler.running), names(scheduler.waiting)) == (["runs"], ["big", "small"])
    assert (scheduler.pool.owned, list(big.pages), big.cached) == (2, [], None)


@pytest.mark.parametrize(("pages", "ahead"), [(2, False), (3, True)])
def test_a_step_is_planned_ahead_only_with_the_pages_for_the_most_that_may_come(pages, ahead):
    scheduler = scheduler_of(pages)
    sequence = ask(scheduler, "r", 7)
    under_way = scheduler.plan()
    (plan,), sources = scheduler.plan_ahead(under_way)
    assert (plan.position, plan.known, plan.drafts, plan.shape, sources) == (6, (0,), (), PLAIN, [0])
    assert len(sequence.pages) == 2, "the token that comes is the eighth"
    commit(scheduler, under_way)
    found = scheduler.plan_ahead(scheduler.plan())
    assert (found is not None) == ahead
    assert (len(sequence.pages), scheduler.pool.owned) == (pages, pages)


@pytest.mark.parametrize(("prompt", "pages"), [(4, 2), (5, 3)])
def test_behind_a_step_that_drafts_all_drafts_are_counted_on(prompt, pages):
    scheduler = scheduler_of(4)
    sequence = ask(scheduler, "r", prompt, drafts="full")
    under_way = scheduler.plan()
    assert under_way[0].shape == Shape(0, (1,), 4)
    (plan,), _ = scheduler.plan_ahead(under_way)
    assert (plan.drafts, plan.shape) == ((1, 2, 3), Shape(3, (1, 2, 3, 4), 4))
    assert len(sequence.pages) == pages, "for the prompt, the anchor and three drafts"


def test_nothing_is_planned_behind_a_last_token():
    scheduler = scheduler_of(8)
    for name, tokens in (("short", 1), ("long", 2)):
        ask(scheduler, name, 4, max_tokens=tokens)
    under_way = scheduler.plan()
    plans, sources = scheduler.plan_ahead(under_way)
    assert (names(plan.sequence for plan in plans), sources) == (["long"], [1])
    commit(scheduler, under_way)
    assert (names(scheduler.running), scheduler.pool.owned) == (["long"], 2)


def test_the_policy_hears_who_reads_and_who_is_about_to_decode():
    heard = []

    class Noted(DraftPolicy):
        def choose(self, views, prompt_rows, coming=0):
            heard.append((len(views), prompt_rows, coming))
            return super().choose(views, prompt_rows, coming)

    scheduler = scheduler_of(32, max_running=3, known_rows=8)
    scheduler.policy = Noted(4, scheduler.policy.cost)
    for name, tokens in (("decodes", 4), ("reads", 20), ("waits", 20), ("waits too", 20)):
        ask(scheduler, name, tokens)
    for _ in range(2):
        commit(scheduler, scheduler.plan())
    assert names(scheduler.waiting) == ["waits", "waits too"]
    assert heard == [(1, 7, 2)] * 2, "one that reads, and one of two for whom there is a place"


def test_drafts_end_before_the_first_that_is_none():
    scheduler = scheduler_of(8)
    sequence = ask(scheduler, "r", 4)
    scheduler.take_drafts(sequence, (5, 6, -1, 8))
    assert sequence.drafts == [5, 6]


def test_how_drafts_held_is_learnt_where_they_have_no_say():
    for trust, learns in ((1.0, True), (0.9, False)):
        scheduler = scheduler_of(8)
        sequence = ask(scheduler, "r", 4, drafts="full", draft_trust=trust)
        assert (sequence.acceptance_rates is not None) == learns
        commit(scheduler, scheduler.plan())
        scheduler.take_drafts(sequence, (TRUTH, 9, 9))
        before = scheduler.policy.new_acceptance_rates().rates()
        (output,) = commit(scheduler, scheduler.plan())
        assert (output.tokens, output.trace.accepted, output.trace.used) == ((TRUTH, TRUTH), 1, 2)
        after = scheduler.policy.new_acceptance_rates().rates()
        if learns:
            assert (after[0] > before[0], after[1] < before[1], after[2] == before[2]) == (True, True, True)
        else:
            assert after == before


def test_drafts_that_were_not_verified_stay_where_the_one_before_them_was_said():
    for first, left in ((TRUTH, [5]), (9, [])):
        scheduler = scheduler_of(8)
        plain, drafting = ask(scheduler, "plain", 4), ask(scheduler, "drafting", 4, drafts="full", block=2)
        commit(scheduler, scheduler.plan())
        scheduler.take_drafts(plain, (first, 5))
        scheduler.take_drafts(drafting, (TRUTH, first, 5))
        assert [plan.drafts for plan in scheduler.plan()] == [(), (TRUTH,)]
        commit(scheduler, scheduler.plan())
        assert (plain.drafts, drafting.drafts) == (left, left)


def test_the_least_urgent_gives_way_itself():
    scheduler = scheduler_of(4)
    ask(scheduler, "urgent", 11)
    low = ask(scheduler, "low", 4, priority=1)
    commit(scheduler, scheduler.plan())
    assert names(plan.sequence for plan in scheduler.plan()) == names(scheduler.running) == ["urgent"]
    assert (names(scheduler.waiting), list(low.pages), low.computed) == (["low"], [], 0)


def test_an_urgent_one_takes_the_only_place():
    scheduler = scheduler_of(16, max_running=1)
    ask(scheduler, "runs", 4, priority=1)
    commit(scheduler, scheduler.plan())
    ask(scheduler, "urgent", 20)
    assert names(plan.sequence for plan in scheduler.plan()) == ["urgent"]
    assert (names(scheduler.running), names(scheduler.waiting)) == (["urgent"], ["runs"])


def test_a_step_is_not_planned_ahead_of_who_may_come_in_with_it():
    scheduler = scheduler_of(16, max_running=1)
    ask(scheduler, "runs", 4)
    under_way = scheduler.plan()
    ask(scheduler, "waits", 4)
    assert scheduler.plan_ahead(under_way) is not None
    ask(scheduler, "urgent", 4, priority=-1)
    assert scheduler.plan_ahead(under_way) is None


def test_who_was_refused_pages_may_come_in_once_there_are_more():
    scheduler = scheduler_of(4)
    for name in ("runs", "goes"):
        ask(scheduler, name, 4)
    commit(scheduler, scheduler.plan())
    ask(scheduler, "refused", 4 * 4)
    under_way = scheduler.plan()
    assert scheduler.plan_ahead(under_way) is not None
    assert scheduler.remove("goes")
    assert scheduler.plan_ahead([plan for plan in under_way if plan.sequence in scheduler.running]) is None


def test_one_who_goes_leaves_the_others_where_they_are():
    scheduler = scheduler_of(8, max_running=2)
    for name in ("a", "b", "c", "d"):
        ask(scheduler, name, 4)
    commit(scheduler, scheduler.plan())
    assert [scheduler.remove(name) for name in ("b", "d", "d")] == [True, True, False]
    assert (names(scheduler.running), names(scheduler.waiting), scheduler.pool.owned) == (["a"], ["c"], 1)
    assert [scheduler.has(name) for name in "abcd"] == [True, False, True, False]


def test_nobody_gives_way_in_vain_where_pages_that_two_share_come_free_once():
    scheduler = scheduler_of(6)
    ask(scheduler, "stays", 2)
    for name in ("one", "other"):
        ask(scheduler, name, 9, priority=1, salt="shared")
        commit(scheduler, scheduler.plan())
    assert scheduler.pool.owned == 5, "two that both have, and one each"
    ask(scheduler, "urgent", 24)
    assert names(plan.sequence for plan in scheduler.plan()) == ["stays", "one", "other"]
    assert (names(scheduler.waiting), scheduler._may_admit()) == (["urgent"], False)
    scheduler.remove("stays")
    assert scheduler._may_admit()
    assert names(plan.sequence for plan in scheduler.plan()) == ["urgent"]
    assert sorted(names(scheduler.waiting)) == ["one", "other"]


def test_a_prompt_whose_scores_are_told_is_computed_anew():
    scheduler = scheduler_of(12)
    ask(scheduler, "first", 9, salt="shared")
    commit(scheduler, scheduler.plan())
    again, read = (ask(scheduler, str(told), 9, salt="shared", prompt_logprobs=told) for told in (None, 0))
    scheduler.plan()
    assert [(each.computed, each.cached) for each in (again, read)] == [(8, 8), (0, 0)]
