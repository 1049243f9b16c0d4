"""What answers are written in."""

from typing import Any

from pydantic_core import to_json

Json = dict[str, Any]


def as_json(told: Any) -> bytes:
    """Plain data as JSON; null for numbers that it has no word for, as infinity."""
    return to_json(told, inf_nan_mode="null")
