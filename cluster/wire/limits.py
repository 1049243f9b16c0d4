"""Limits of a body's fields, as pydantic checks them and as the document tells them."""

from typing import Any

from pydantic import BeforeValidator, Field


def few(most: int) -> BeforeValidator:
    """At most so many keys: each wrong one would be an error of its own."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} keys are taken")
        return value

    return BeforeValidator(check)


def told(**limits: float) -> Any:
    """Limits that the document tells; `SamplingParams` checks them, for whoever makes one."""
    return Field(json_schema_extra=dict(limits))
