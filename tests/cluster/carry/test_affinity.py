"""Where a prompt goes: to its prefix, unless that replica has no room; and what a router knows of prefixes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.carry.affinity import (
    CROWDED,
    MOVED_SECONDS,
    REMEMBER_SECONDS,
    REMEMBERED,
    SPARE,
    TIMES,
    Candidate,
    Prefixes,
    Recent,
    best,
)
from cluster.line import PROMPT_MARKS, PUBLISHED_MARKS
from tidar_core.engine.pages import PagePool
from tidar_core.prefixes import MARK_BYTES, first_key, mark_pages, page_keys, prefix_marks, split_marks

CANDIDATES = st.lists(
    st.builds(Candidate, load=st.integers(0, 40), pages=st.sampled_from([0.0, 0.5, 1.0]), depth=st.integers(0, 4)),
    min_size=1,
    max_size=6,
)
MARKS = [bytes([number]) * 8 for number in range(5)]
PAGE_SIZE = 16
LENGTHS = [500, 8_000, 40_000, 100_000, 128_000]  # of conversations, in tokens


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_the_longest_prefix_with_room_wins(candidates: list[Candidate], chance: random.Random) -> None:
    chosen = candidates[best(candidates, chance)]
    least = min(candidate.load for candidate in candidates)
    spacious = [candidate for candidate in candidates if candidate.pages <= CROWDED] or candidates
    roomy = [candidate for candidate in spacious if candidate.load <= TIMES * least + SPARE] or candidates
    assert chosen in roomy
    assert chosen.depth == max(candidate.depth for candidate in roomy)
    if chosen.depth:
        assert chosen.load == min(candidate.load for candidate in roomy if candidate.depth == chosen.depth)
    elif len(roomy) > 1:
        assert chosen.load < max(candidate.load for candidate in roomy) or len({one.load for one in roomy}) < len(roomy)


@pytest.mark.parametrize(
    ("candidates", "place"),
    [
        ([Candidate(14, depth=9), Candidate(5, depth=2)], 0),  # busier, and not overloaded: 2 * 5 + 4
        ([Candidate(15, depth=9), Candidate(5, depth=2)], 1),
        ([Candidate(1, depth=9, pages=0.95), Candidate(3)], 1),
        ([Candidate(1, depth=9, pages=0.95), Candidate(3, pages=0.92)], 0),  # no pages are free anywhere
        ([Candidate(15, depth=9, pages=0.95), Candidate(5, depth=2, pages=0.92)], 1),
        ([Candidate(3, depth=4), Candidate(2, depth=4)], 1),
        ([Candidate(7), Candidate(6)], 1),
    ],
)
def test_a_prefix_is_worth_some_load_and_no_crowd(candidates: list[Candidate], place: int) -> None:
    assert {best(candidates, random.Random(seed)) for seed in range(20)} == {place}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(2, 5), st.randoms(use_true_random=False))
def test_prompts_that_begin_alike_meet_and_nobody_is_buried(
    families: list[int], replicas: int, chance: random.Random
) -> None:
    prefixes = Prefixes(now=lambda: 0.0)
    names = [f"r{number}" for number in range(replicas)]
    loads = [0] * replicas
    last: dict[int, int] = {}
    for family in families:
        marks = [bytes([family, 0]) * 4, bytes([family, 1]) * 4]
        known = [prefixes.depth(name, marks) for name in names]
        place = best([Candidate(load, 0.0, depth) for load, depth in zip(loads, known, strict=True)], chance)
        if family in last and loads[last[family]] <= TIMES * min(loads) + SPARE:
            assert known[place] == 2, "a replica that has the prefix and room was passed by"
        prefixes.sent(names[place], marks)
        loads[place] += 1
        last[family] = place
        assert max(loads) <= TIMES * min(loads) + SPARE + 1


@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.integers(0, 40), st.randoms(use_true_random=False))
def test_streams_that_move_together_are_shared_out(loads: list[int], streams: int, chance: random.Random) -> None:
    """An idle replica would get them all, and compute them one after the other."""
    moves, busy = Recent(MOVED_SECONDS, now=lambda: 0.0), list(loads)
    for _ in range(streams):
        given = [moves.count(name) for name in "ab"]
        place = best([Candidate(load, moved=count) for load, count in zip(busy, given, strict=True)], chance)
        moves.note("ab"[place])
        busy[place] += 1
    fewer, more = sorted(moves.count(name) for name in "ab")
    # As many as it takes until the other no longer counts as overloaded: two answers under way for each that moved.
    assert more - fewer <= max(1, (max(loads) - SPARE) // TIMES)
    if streams >= max(loads):
        assert more - fewer <= 1


def test_streams_that_moved_long_ago_count_for_nothing() -> None:
    moment = 0.0
    moves = Recent(MOVED_SECONDS, now=lambda: moment)
    moves.note("a")
    moment = MOVED_SECONDS / 2
    moves.note("a")
    assert (moves.count("a"), moves.count("b")) == (2, 0)
    moment = MOVED_SECONDS
    assert moves.count("a") == 1
    moment = 2 * MOVED_SECONDS
    assert moves.count("a") == 0
    moves.drop_one("a")
    assert moves._moments == {}, "nothing is kept of a replica that is gone"


def test_a_moving_stream_keeps_to_its_prefix_until_others_did_and_clear_of_who_has_no_room() -> None:
    chance = random.Random(0)
    assert best([Candidate(3, moved=2, depth=1), Candidate(3)], chance) == 0
    assert best([Candidate(3, moved=SPARE + 1, depth=1), Candidate(3)], chance) == 1
    assert best([Candidate(9, moved=4), Candidate(0, pages=1.0)], chance) == 0
    assert best([Candidate(9, moved=9), Candidate(100)], chance) == 0


@given(
    published=st.sets(st.sampled_from(MARKS)),
    sent=st.dictionaries(st.sampled_from(MARKS), st.floats(0, 100)),
    now=st.floats(100, 100 + 2 * REMEMBER_SECONDS),
    prompt=st.lists(st.sampled_from(MARKS), unique=True),
)
def test_a_prefix_is_known_by_what_was_published_and_lately_sent(
    published: set[bytes], sent: dict[bytes, float], now: float, prompt: list[bytes]
) -> None:
    clock = [0.0]
    prefixes = Prefixes(now=lambda: clock[0])
    for mark, moment in sorted(sent.items(), key=lambda entry: entry[1]):
        clock[0] = moment
        prefixes.sent("here", [mark])
    clock[0] = now
    prefixes.read("here", {"marks": b"".join(published), "load": 3, "pages": 0.25})
    recent = {mark for mark, moment in sent.items() if moment > now - REMEMBER_SECONDS}
    known = [mark in published | recent for mark in prompt]
    assert prefixes.depth("here", prompt) == max((count for count, here in enumerate(known, 1) if here), default=0)
    assert prefixes.depth("elsewhere", prompt) == 0
    prefixes.keep([])
    assert prefixes.depth("here", prompt) == max(
        (count for count, mark in enumerate(prompt, 1) if mark in recent), default=0
    )


def test_new_stats_take_the_place_of_the_old() -> None:
    prefixes = Prefixes()
    first, second = ({"marks": mark, "load": load, "pages": 0.5} for mark, load in zip(MARKS, (1, 2), strict=False))
    assert prefixes.read("r", {}).load == 0
    assert prefixes.read("r", first).load == 1
    assert prefixes.depth("r", MARKS[:1]) == 1
    assert prefixes.read("r", second).load == 2
    assert prefixes.depth("r", MARKS[:1]) == 0


def test_what_is_remembered_and_what_travels_is_bounded() -> None:
    prefixes = Prefixes()
    for number in range(REMEMBERED // 1000 + 2):
        prefixes.sent("r", [number.to_bytes(4, "little") + place.to_bytes(4, "little") for place in range(1000)])
    assert len(prefixes._sent) == REMEMBERED
    assert prefixes.depth("r", [bytes(8)]) == 0, "the oldest was forgotten"
    assert len(split_marks(prefix_marks(range(400_000), 16, "", PROMPT_MARKS))) == PROMPT_MARKS


def converse(pool: PagePool, tokens: range) -> None:
    """Leave a conversation in a replica's cache, as the scheduler does."""
    keys = list(page_keys(tokens, PAGE_SIZE, first_key("")))
    pages = pool.take_known(keys)
    pages += pool.take(len(keys) - len(pages))
    for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
        pool.publish(page, key, mark=mark_pages(place))
    pool.give_back(pages)


def tokens_found(pool: PagePool, prompt: range) -> int:
    """How long a prefix of a prompt a router finds by what the replica publishes."""
    published = pool.marks(PUBLISHED_MARKS)
    assert len(published) <= PUBLISHED_MARKS * MARK_BYTES == 8192
    prefixes = Prefixes()
    prefixes.read("r", {"marks": published, "load": 0, "pages": 0.0})
    marks = split_marks(prefix_marks(prompt, PAGE_SIZE, "", PROMPT_MARKS))
    places = [page + 1 for page in range(len(prompt) // PAGE_SIZE) if mark_pages(page)]
    return PAGE_SIZE * max(places[: prefixes.depth("r", marks)], default=0)


@pytest.mark.parametrize("other", [1_000, 2_000, 8_000, 20_000])
def test_a_long_conversation_is_found_also_after_much_other_traffic(other: int) -> None:
    """In a cache as an H200 has it beside an 8B model."""
    pool = PagePool(690_000 // PAGE_SIZE)
    talks = [range(talk * 500_000, talk * 500_000 + length) for talk, length in enumerate(LENGTHS)]
    for talk in talks:
        converse(pool, talk)
        assert tokens_found(pool, talk) >= len(talk) - max(64, min(2048, len(talk) // 16)) - PAGE_SIZE
    for start in range(10_000_000, 10_400_000, other):
        converse(pool, range(start, start + other))
    for talk in talks:
        assert tokens_found(pool, talk) >= len(talk) - 2048
    again = talks[LENGTHS.index(8_000)]
    converse(pool, again)
    assert tokens_found(pool, again) >= len(again) * 0.97, "what was used last is known best"


def test_what_is_computed_only_as_far_is_found_only_as_far() -> None:
    pool = PagePool(690_000 // PAGE_SIZE)
    converse(pool, range(50_000))
    assert 50_000 - 2048 <= tokens_found(pool, range(250_000)) <= 50_000
    assert tokens_found(pool, range(1, 250_000)) == 0


def test_marks_that_are_told_again_are_not_split_again() -> None:
    """Serve hands out the stats of all replicas, as new objects, whenever one of them has news."""
    prefixes = Prefixes()
    first = prefixes.read("r", {"marks": b"".join(MARKS), "load": 1, "pages": 0.5})
    again = prefixes.read("r", {"marks": b"".join(MARKS), "load": 2, "pages": 0.25})
    assert again.marks is first.marks
    assert (again.load, again.pages) == (2, 0.25)
    assert prefixes.read("r", {"marks": MARKS[0], "load": 2, "pages": 0.25}).marks == {MARKS[0]}
