"""Who is let in, who gives way, and what of a prompt is kept for others."""

from dataclasses import replace

from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.prefixes import prefix_marks
from tidar_core.request import Request, SamplingParams

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
