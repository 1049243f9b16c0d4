"""The pool of K/V pages: who owns what, in numbers alone."""

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers 1 … total; page 0 is the trash page, which nobody owns.

    At every moment free + owned = total. Taking a page that is not free or giving back one that is not owned is
    a mistake of the caller and raises ValueError.
    """

    def __init__(self, total: int):
        if total < 1:
            raise ValueError("a page pool needs at least one page")
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owned: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return len(self._owned)

    def take(self, count: int) -> list[int]:
        """`count` free pages; raises ValueError if there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page not in self._owned:
                raise ValueError(f"page {page} is not owned")
            self._owned.remove(page)
            self._free.append(page)
