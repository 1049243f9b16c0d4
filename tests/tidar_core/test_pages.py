"""Free + owned + cached = total, whatever happens; what is found under a key was published under it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidar_core.engine.pages import PagePool, first_key, page_keys

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Owners come and go; `contents` models what was published where."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.owners: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        if count <= self.pool.available:
            pages = self.pool.take(count)
            for page in pages:
                assert all(page not in owned for owned in self.owners)
                self.contents.pop(page, None)
            self.owners.append(pages)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def publish(self, data, key):
        page = data.draw(st.sampled_from([page for owned in self.owners for page in owned]))
        self.pool.publish(page, key)
        if page not in self.contents and key not in self.contents.values():
            self.contents[page] = key

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
