"""The pool of K/V pages: who owns what, and which contents are still there to be used again. Numbers alone."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from tidar_core.prefixes import MARK_BYTES

LATEST_SHARE = 4  # where not all marks are told, a fourth are the latest used ones


class PagePool:
    """Hands out page numbers 1 … total; page 0 is the trash page, which nobody owns.

    A page is free, owned by one or more sequences, or cached: owned by nobody, its contents kept under their key
    until the space is needed (least recently used first). At every moment free + owned + cached = total. Taking more
    than there is or giving back a page that is not owned is a mistake of the caller and raises ValueError.
    """

    def __init__(self, total: int):
        if total < 1:
            raise ValueError("a page pool needs at least one page")
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owners: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._marks: OrderedDict[bytes, int] = OrderedDict()  # the pages of each; the latest used last

    @property
    def available(self) -> int:
        """Pages that `take` can hand out: free ones, and cached ones whose contents it would drop."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        """Pages that nobody owns and that hold nothing worth keeping."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Pages with at least one owner; a shared page counts once."""
        return len(self._owners)

    @property
    def cached(self) -> int:
        """Pages without an owner whose contents are kept."""
        return len(self._cached)

    def freed_by(self, owners: Iterable[Sequence[int]]) -> int:
        """Pages that nobody would own any more once these owners gave all of theirs back."""
        going = Counter(chain.from_iterable(owners))
        return sum(self._owners.get(page) == count for page, count in going.items())

    def take(self, count: int) -> list[int]:
        """`count` pages to write; raises ValueError if fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} pages wanted, {self.available} available")
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._marks.pop(key, None)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def take_known(self, keys: Iterable[bytes]) -> list[int]:
        """The pages whose contents the leading keys name, as far as they are here; to read, never to write."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            if key in self._marks:
                self._marks.move_to_end(key)
            self._owners[page] = self._owners.get(page, 0) + 1
            pages.append(page)
        return pages

    def knows(self, key: bytes) -> bool:
        """Whether `take_known` would find a page under a key."""
        return key in self._page_of

    def publish(self, page: int, key: bytes, mark: int = 0) -> None:
        """An owned page is complete and will not be written again: others may find it under `key`, and `marks` tells
        of it where it is a mark for so many pages (`mark_pages`)."""
        if page not in self._owners:
            raise ValueError(f"page {page} is not owned")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if mark:
                self._marks[key] = mark

    def marks(self, limit: int) -> bytes:
        """The marks of what can be found here, MARK_BYTES each, the latest used first, at most `limit` (1 or more). Of
        more than that only the latest used are told in full, and some of the others, each for as many pages: a router
        that has all marks of a prompt finds its prefix all the same, if up to so many pages shorter."""
        if len(self._marks) <= limit:
            told = list(reversed(self._marks))
        else:
            latest = limit // LATEST_SHARE
            told = list(islice(reversed(self._marks), latest))
            share = sum(islice(reversed(self._marks.values()), latest, None)) / (limit - latest)
            untold = share  # so that the first is told
            for key, pages in islice(reversed(self._marks.items()), latest, None):
                untold += pages
                if untold >= share:
                    told.append(key)
                    untold = 0
        return b"".join(key[:MARK_BYTES] for key in told)

    def give_back(self, pages: Sequence[int]) -> None:
        """One owner lets go of its pages. Of those that nobody owns any more the published ones stay cached."""
        for page in reversed(pages):  # a page is of no use without those before it: the last is dropped first
            if page not in self._owners:
                raise ValueError(f"page {page} is not owned")
            key = self._key_of.get(page)
            if key is not None and key in self._marks:  # one prefix's lie side by side, whatever ran at the same time
                self._marks.move_to_end(key)
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            del self._owners[page]
            if key is None:
                self._free.append(page)
            else:
                self._cached[page] = None
