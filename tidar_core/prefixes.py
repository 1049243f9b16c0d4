"""Names for the prefixes of a text: hashes of whole K/V pages, and the few of them that mark a prefix from afar.

No torch in here, as those who choose a replica for a prompt have none.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

MARK_BYTES = 8  # of the key of a page that marks a prefix, for those who compare caches from afar
NEAREST, FARTHEST = 4, 128  # pages from one mark to the next: 64 and 2,048 tokens by the pages' usual size
DEPTH_SHARE = 16  # in between, a sixteenth of the depth at most: little of a prefix is overlooked


def first_key(salt: str) -> bytes:
    """What comes before the first page. Requests with different salts never share a page."""
    return blake2b(salt.encode(), digest_size=16).digest()


def page_keys(tokens: Sequence[int], page_size: int, key: bytes) -> Iterator[bytes]:
    """A key for each full page of `tokens`: a hash of its tokens and of the key before it.

    Equal keys mean equal contents: K/V at a position depend on the tokens up to it alone.
    """
    content, width = array("I", tokens).tobytes(), 4 * page_size  # three times as fast as struct.pack
    for start in range(0, len(content) - width + 1, width):
        key = blake2b(key + content[start : start + width], digest_size=16).digest()
        yield key


def mark_pages(page: int) -> int:
    """Where the key of a sequence's page (counted from 0) is one that marks its prefix: how many pages there are from
    the mark before to this one. 0 where it is none. Marks get fewer with the depth, so that those of a long prompt fit
    in a call: 32 on the first 128 pages, then 16 each time the depth doubles, and beyond 2,048 pages one on 128."""
    depth = page + 1
    if depth % NEAREST:
        return 0
    doubled = 1 << (page.bit_length() - 1)  # the largest power of two below the depth
    spacing = min(max(doubled // DEPTH_SHARE, NEAREST), FARTHEST)
    return 0 if depth % spacing else spacing


def prefix_marks(tokens: Sequence[int], page_size: int, salt: str, limit: int) -> bytes:
    """The marks of a prompt's prefixes, MARK_BYTES each, shortest first, at most `limit`: what a page pool that
    computed them tells of them (`PagePool.marks`). The last token is left out, as it is always computed."""
    keys = page_keys(tokens[:-1], page_size, first_key(salt))
    return b"".join(islice((key[:MARK_BYTES] for page, key in enumerate(keys) if mark_pages(page)), limit))


def split_marks(marks: bytes) -> list[bytes]:
    """One by one."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES)]
