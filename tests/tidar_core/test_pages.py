"""Free + owned = total, whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidar_core.engine.pages import PagePool


@given(st.integers(1, 20), st.lists(st.integers(-8, 8), max_size=40))
def test_every_page_is_free_or_owned_once(total, moves):
    pool, held = PagePool(total), []
    for move in moves:
        if move >= 0 and move <= pool.free:
            held += pool.take(move)
        elif move < 0:
            pool.give_back(held[:-move])
            del held[:-move]
        assert pool.free + pool.owned == total
        assert len(set(held)) == len(held) == pool.owned
        assert all(1 <= page <= total for page in held)


def test_mistakes_are_told():
    pool = PagePool(2)
    pages = pool.take(2)
    with pytest.raises(ValueError, match="1 pages wanted, 0 free"):
        pool.take(1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match="not owned"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="at least one"):
        PagePool(0)
