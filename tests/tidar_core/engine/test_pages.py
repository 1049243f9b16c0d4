"""Free + owned + cached = total, whatever happens; what is found under a key was published under it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidar_core.engine.pages import PagePool
from tidar_core.prefixes import MARK_BYTES, first_key, page_keys, prefix_marks, split_marks

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
    pool.give_back(pool.take_known([b"a" * 16]))
    assert pool.marks(9) == b"a" * 8 + b"c" * 8
    assert pool.marks(1) == b"a" * 8


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
