"""Limits of a body's fields, as pydantic checks them and as the document tells them."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field


def few(most: int) -> BeforeValidator:
    """At most so many keys: each wrong one would be an error of its own."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} keys are taken")
        return value

    return BeforeValidator(check)


def shallow(most: int) -> BeforeValidator:
    """At most so many levels of lists and objects: what is nested deeper would be an error at each of its places."""

    def check(value: object) -> object:
        layer = [value]
        for _ in range(most):
            inner = (one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, dict | list))
            layer = [item for items in inner for item in items if isinstance(item, dict | list)]
            if not layer:
                return value
        raise ValueError(f"at most {most} levels of lists and objects are taken")

    return BeforeValidator(check)


# In brackets the name of a branch is no part of the name of a field: see `from_validation`.
WORD, OBJECT = "(word)", "(object)"


def word_or_object(what: str) -> Discriminator:
    """Between a word and an object, so that an error is told of the one that was given; `what` says what it may be."""

    def kind_of(value: object) -> str | None:
        return WORD if isinstance(value, str) else OBJECT if isinstance(value, dict | BaseModel) else None

    return Discriminator(kind_of, custom_error_type="kind", custom_error_message=f"must be {what}")


def stated(**limits: float) -> Any:
    """Limits that the document states; `SamplingParams` checks them, for whoever makes one."""
    return Field(json_schema_extra=dict(limits))
