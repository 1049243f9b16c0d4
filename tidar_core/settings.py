"""Options that come from outside, a config file or a builder's arguments, read so that a mistake is one line."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tidar_core.config import ConfigError
from tidar_core.error_text import shortened

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_options(kind: type[ModelT], given: Mapping[str, Any]) -> ModelT:
    """The options that `given` names, as a `kind` that forbids unknown keys, at any depth.

    Raises ConfigError for the first mistake: the key, what is wrong with it, what would be right.
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(first_mistake(error, kind)) from None


def first_mistake(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong with the first key that pydantic refused of a `kind`, in one line."""
    return all_mistakes(error, kind)[0]


def all_mistakes(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    """What is wrong with each key that pydantic refused of a `kind`, a line each."""
    found = sorted(error.errors(), key=lambda one: one["type"] == "missing")  # one that is misspelt is missing, too
    return [_line(mistake, kind) for mistake in found]


def _line(mistake: ErrorDetails, kind: type[BaseModel]) -> str:
    place = [str(step) for step in mistake["loc"]]
    key = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        return f"unknown key '{key}'{suggestion(place[-1], keys_beside(place, kind))}"
    message = mistake["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not key:
        return message
    if mistake["type"] == "missing":
        return f"{key} is missing"
    given = mistake["input"]
    # A whole part of a file would hide what is wrong with it.
    return f"{key}: {message}" if isinstance(given, list | dict) else f"{key} is {shortened(given)}: {message}"


def keys_beside(place: Sequence[str], kind: type[BaseModel]) -> Iterable[str]:
    """The keys that may stand at a place in a `kind`, which may lie in a model within it."""
    for step in place[:-1]:
        if step in kind.model_fields:  # else it is a key or an index of the user's own, in a dict or a list of models
            kind = next(models_in(kind.model_fields[step].annotation), kind)
    return kind.model_fields


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a line that refuses a word: the known one that it is nearest to, or all of them."""
    words = {name.lower(): name for name in known}
    counted = [name for name in words if word.lower() == f"num_{name}"]  # as others count: min_ would be nearer
    near = counted or get_close_matches(word.lower(), words, n=1)
    return f": did you mean '{words[near[0]]}'?" if near else f": there are {', '.join(words.values())}"
