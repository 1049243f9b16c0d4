"""Free + owned + cached = total, whatever happens; what is found under a key was published under it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidar_core.engine.pages import LATEST_SHARE, PagePool
from tidar_core.prefixes import (
    FARTHEST,
    MARK_BYTES,
    NEAREST,
    first_key,
    mark_pages,
    page_keys,
    prefix_marks,
    split_marks,
)

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Owners come and go; `contents` models what was published where."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.owners: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.marked: set[bytes | None] = set()

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        if count <= self.pool.available:
            pages = self.pool.take(count)
            for page in pages:
                assert all(page not in owned for owned in self.owners)
                self.marked.discard(self.contents.pop(page, None))
            self.owners.append(pages)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1), mark=st.booleans())
    def publish(self, data, key, mark):
        page = data.draw(st.sampled_from([page for owned in self.owners for page in owned]))
        self.pool.publish(page, key, mark)
        if page not in self.contents and key not in self.contents.values():
            self.contents[page] = key
            if mark:
                self.marked.add(key)

    @rule(keys=st.lists(st.binary(min_size=1, max_size=1), max_size=3, unique=True))
    def take_known(self, keys):
        pages = self.pool.take_known(keys)
        assert [self.contents[page] for page in pages] == keys[: len(pages)]
        if len(pages) < len(keys):
            assert keys[len(pages)] not in self.contents.values()
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data):
        self.pool.give_back(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def every_page_is_somewhere_once(self):
        pool = self.pool
        assert pool.free + pool.owned + pool.cached == TOTAL
        assert pool.owned == len({page for owned in self.owners for page in owned})

    @invariant()
    def marks_tell_of_what_can_be_found(self):
        assert sorted(self.pool.marks(TOTAL)) == sorted(b"".join(self.marked))


TestPool = Pool.TestCase


def test_the_least_recently_used_contents_go_first():
    pool = PagePool(3)
    for key in (b"a", b"b", b"c"):
        (page,) = pool.take(1)
        pool.publish(page, key)
        pool.give_back([page])
    pool.give_back(pool.take_known([b"a"]))
    pool.take(1)
    assert [pool.knows(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert pool.take_known([b"b"]) == []
    assert len(pool.take_known([b"a"])) == len(pool.take_known([b"c"])) == 1


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(first, second):
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    keys, others = (list(page_keys(tokens, 4, first_key(""))) for tokens in (first, second))
    assert len(keys) == len(first) // 4
    assert keys[: common // 4] == others[: common // 4]
    assert not set(keys[common // 4 :]) & set(others[common // 4 :])
    assert not set(keys) & set(page_keys(first, 4, first_key("another tenant")))
    for start in range(len(keys)):  # a chain can be taken up anywhere
        before = keys[start - 1] if start else first_key("")
        assert list(page_keys(first[4 * start :], 4, before)) == keys[start:]


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60), st.integers(0, 5))
def test_marks_are_equal_as_far_as_every_fourth_page_is(first, second, limit):
    ours, theirs = (split_marks(prefix_marks(tokens, 2, "", limit)) for tokens in (first, second))
    assert len(ours) == min(limit, max(0, len(first) - 1) // 8)
    keys = [list(page_keys(tokens[:-1], 2, first_key(""))) for tokens in (first, second)]
    for mark in range(min(len(ours), len(theirs))):
        page = 4 * mark + 3
        assert (ours[mark] == theirs[mark]) == (keys[0][page] == keys[1][page])
        assert ours[mark] == keys[0][page][:MARK_BYTES]


@given(st.integers(1, 9_000), st.integers(1, 3), st.integers(1, 300), st.integers(1, 200))
def test_a_pool_and_a_prompt_mark_the_same_places(tokens, page_size, limit, step):
    """Whatever the pages' size, and in however many steps the pool's owner computes them."""
    keys = list(page_keys(range(tokens), page_size, first_key("salt")))
    pool = PagePool(max(1, len(keys)))
    pages = pool.take(len(keys))
    for start in range(0, len(keys), step):
        for place in range(start, min(start + step, len(keys))):
            pool.publish(pages[place], keys[place], mark=mark_pages(place))
    ours = split_marks(pool.marks(tokens))[::-1]
    theirs = split_marks(prefix_marks(range(tokens + 1), page_size, "salt", limit))
    assert theirs == ours[:limit]
    assert ours == [key[:MARK_BYTES] for place, key in enumerate(keys) if mark_pages(place)]


def test_marks_get_fewer_with_the_depth_and_none_is_far_from_the_one_before():
    depth = 0
    for page in range(25_000):
        if pages := mark_pages(page):
            depth += pages
            assert depth == page + 1
            assert pages <= max(NEAREST, min(FARTHEST, depth / 16))
    assert depth > 25_000 - FARTHEST


def test_the_last_token_marks_nothing_and_no_more_is_told_than_may_be():
    assert [len(split_marks(prefix_marks(range(length), 2, "", 9))) for length in (8, 9, 16, 17)] == [0, 1, 1, 2]
    assert prefix_marks(range(100), 2, "", 3) == prefix_marks(range(25), 2, "", 9)


def test_the_marks_used_last_are_told_first():
    pool = PagePool(3)
    for key in (b"a" * 16, b"b" * 16, b"c" * 16):
        (page,) = pool.take(1)
        pool.publish(page, key, mark=key != b"b" * 16)
        pool.give_back([page])
    assert pool.marks(9) == b"c" * 8 + b"a" * 8
    pages = pool.take_known([b"a" * 16])
    assert pool.marks(9) == b"a" * 8 + b"c" * 8, "while it is read"
    pool.take_known([b"c" * 16])
    pool.give_back(pages)
    assert pool.marks(9) == b"a" * 8 + b"c" * 8, "and when it was"
    assert pool.marks(1) == b"a" * 8


@given(st.lists(st.integers(1, 600), min_size=1, max_size=12), st.integers(1, 40))
def test_where_not_all_marks_are_told_each_that_is_stands_for_as_many_pages(lengths, limit):
    """So that the end of every prefix is near to one."""
    pool = PagePool(sum(lengths))
    told_of: list[tuple[bytes, int]] = []  # all marks and their pages, the latest used first
    for salt, length in enumerate(lengths):
        keys = list(page_keys(range(length), 1, first_key(str(salt))))
        pages = pool.take(length)
        for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
            pool.publish(page, key, mark=mark_pages(place))
        pool.give_back(pages)
        told_of[:0] = [(key[:MARK_BYTES], mark_pages(place)) for place, key in enumerate(keys) if mark_pages(place)]
    told, every = split_marks(pool.marks(limit)), [mark for mark, _ in told_of]
    assert told == [mark for mark in every if mark in told], "the latest used first"
    if len(every) <= limit:
        assert told == every
        return
    latest = limit // LATEST_SHARE
    assert len(told) <= limit
    assert told[:latest] == every[:latest]
    others = told_of[latest:]
    share = sum(pages for _, pages in others) / (limit - latest)
    untold = 0
    for mark, pages in others:
        untold = 0 if mark in told else untold + pages
        assert untold < share


def test_the_marks_of_one_prefix_are_told_side_by_side_also_where_two_were_computed_at_once():
    """Else those that are told of many, one in so many, might all be of the same."""
    pool = PagePool(4)
    ours, theirs = pool.take(2), pool.take(2)
    for place in range(2):
        for pages, name in ((ours, b"a"), (theirs, b"b")):
            pool.publish(pages[place], (name + bytes([place])) * 8, mark=4)
    for pages in (theirs, ours):
        pool.give_back(pages)
    assert [mark[:2] for mark in split_marks(pool.marks(9))] == [b"a\0", b"a\1", b"b\0", b"b\1"]


def test_mistakes_are_told():
    pool = PagePool(2)
    pages = pool.take(2)
    with pytest.raises(ValueError, match="1 pages wanted, 0 available"):
        pool.take(1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match="not owned"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="not owned"):
        pool.publish(pages[0], b"key")
    with pytest.raises(ValueError, match="at least one"):
        PagePool(0)


def test_of_a_prefix_the_end_is_dropped_first():
    """A page is of no use without those before it."""
    pool = PagePool(3)
    pages = pool.take(3)
    for page, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.publish(page, key)
    pool.give_back(pages)
    pool.take(1)
    assert pool.take_known([b"a", b"b", b"c"]) == pages[:2]
