"""What answers are written in."""

from typing import Any

from pydantic_core import to_json

Json = dict[str, Any]
# Clients that read an event stream by Python's `splitlines`, as httpx does, take these for ends of lines too.
LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def as_json(told: Any) -> bytes:
    """Plain data as JSON; null for numbers that it has no word for, as infinity."""
    return in_one_line(to_json(told, inf_nan_mode="null"))


def in_one_line(json: bytes) -> bytes:
    """The same JSON, whatever the reader holds for the end of a line."""
    for end, escaped in LINE_ENDS.items():
        json = json.replace(end, escaped)
    return json
