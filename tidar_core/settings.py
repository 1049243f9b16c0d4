"""Options that come from outside, a config file or a builder's arguments, read so that a mistake is one line."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tidar_core.config import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_options(kind: type[ModelT], given: Mapping[str, Any]) -> ModelT:
    """The options that `given` names, as a `kind` that forbids unknown keys.

    Raises ConfigError for the first mistake: the key, what is wrong with it, what would be right.
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(first_mistake(error, kind.model_fields)) from None


def first_mistake(error: ValidationError, known: Iterable[str]) -> str:
    """What is wrong with the first key that pydantic refused, in one line; `known` are the keys that there are."""
    mistake = error.errors()[0]
    key = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return f"unknown key '{key}'{suggestion(key, known)}"
    said = mistake["msg"].removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    if not key:
        return said
    return f"{key} is missing" if mistake["type"] == "missing" else f"{key} is {mistake['input']!r}: {said}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a line that refuses a word: the known one that it is nearest to, or all of them."""
    words = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), words, n=1)
    return f": did you mean '{words[near[0]]}'?" if near else f": there are {', '.join(words.values())}"
