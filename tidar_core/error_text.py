"""What an error says, in a line for the user."""

from typing import Any


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it has none."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


def last_line(text: str, otherwise: str) -> str:
    """The last line of a text; `otherwise` where it has none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else otherwise


def unbroken(text: str) -> str:
    """A text of any number of lines as one."""
    return " ".join(text.split())


def one_line(error: BaseException) -> str:
    """What begins an error's message, however many lines it has; the name of its type where it has none."""
    text = unbroken(str(error)).rstrip(".")
    return (text[:200] + " …" if len(text) > 200 else text) or type(error).__name__


def shortened(given: Any) -> str:
    """A value as a line can hold it."""
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."
