"""Names for the prefixes of a text: hashes of whole K/V pages, and the few of them that mark a prefix from afar.

No torch in here, as those who choose a replica for a prompt have none.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack

MARK_PAGES = 4  # every fourth page's key marks a prefix, for those who compare caches from afar
MARK_BYTES = 8  # of the key


def first_key(salt: str) -> bytes:
    """What comes before the first page. Requests with different salts never share a page."""
    return blake2b(salt.encode(), digest_size=16).digest()


def page_keys(tokens: Sequence[int], page_size: int, key: bytes) -> Iterator[bytes]:
    """A key for each full page of `tokens`: a hash of its tokens and of the key before it.

    Equal keys mean equal contents: K/V at a position depend on the tokens up to it alone.
    """
    content, width = pack(f"<{len(tokens)}I", *tokens), 4 * page_size
    for start in range(0, len(content) - width + 1, width):
        key = blake2b(key + content[start : start + width], digest_size=16).digest()
        yield key


def is_mark(page: int) -> bool:
    """Whether the key of a sequence's page (counted from 0) is one that marks its prefix."""
    return (page + 1) % MARK_PAGES == 0


def prefix_marks(tokens: Sequence[int], page_size: int, salt: str, limit: int) -> bytes:
    """The marks of a prompt's prefixes, MARK_BYTES each, shortest first, at most `limit`: what a page pool that
    computed them tells of them (`PagePool.marks`). The last token is left out, as it is always computed."""
    length = min(len(tokens) - 1, limit * MARK_PAGES * page_size)
    keys = page_keys(tokens[:length], page_size, first_key(salt))
    return b"".join(key[:MARK_BYTES] for page, key in enumerate(keys) if is_mark(page))


def split_marks(marks: bytes) -> list[bytes]:
    """One by one."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES)]
