"""What an error says, in a line for the user."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it has none."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
