"""By which ids clients may have their requests named."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.request_ids import RequestIds


def taken(*given: bytes) -> list[bytes]:
    """The ids that Serve sees of those that a client sends, among other headers."""
    seen: list[bytes] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        assert (b"host", b"tidar") in scope["headers"]
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    headers = [(b"x-request-id", value) for value in given]
    scope = {"type": "http", "headers": [(b"host", b"tidar"), *headers, (b"accept", b"*/*")]}
    asyncio.run(RequestIds(serve)(scope, receive, send))
    return seen


@pytest.mark.parametrize("fit", [b"7d1f3a52-0c1e", b"Root=1-67:a/b+c@d~e_f.g", b"a" * 128])
def test_what_can_be_a_name_is_taken(fit: bytes) -> None:
    assert taken(fit) == [fit]


@pytest.mark.parametrize("unfit", [b"", b"a" * 129, b"ERROR fake line", b"a\tb", b"caf\xe9", b"caf\xc3\xa9", b"a\n"])
def test_what_cannot_is_left_to_serve(unfit: bytes) -> None:
    assert taken(unfit) == []


def test_so_are_several_and_none() -> None:
    assert taken(b"a", b"b") == taken() == []
