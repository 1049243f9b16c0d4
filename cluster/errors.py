"""Errors as a client sees them: OpenAI's object and status codes, one clear line, never a stack trace."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from tidar_core.error_text import unbroken
from tidar_core.request import RequestError

RETRY_AFTER_SECONDS = 1
SHAPES = {  # JSON's words for what pydantic tells in Python's
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
}
MAX_NAME = 200  # characters of a name that are told again
MAX_MESSAGE = 500
MODEL_CHANGED = "model_changed"
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `param` is the field at fault, `code` a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: {"error": {message, type, param, code}}."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole HTTP answer; 429 and 503 tell when to try again, behind 408 nothing is read any more."""
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else None
        if self.status == 408:
            headers = {"Connection": "close"}
        return JSONResponse(self.body(), self.status, headers)


class FieldError(ValueError):
    """What pydantic is told of a body whose fields do not go together; `param` is the one at fault."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    there = ", ".join(f"`{one}`" for one in served)
    quoted = unbroken(name[:MAX_NAME]) + "…" * (len(name) > MAX_NAME)
    message = f"The model `{quoted}` does not exist; this server has {there}."
    return ApiError(404, message, "model", "model_not_found")


def too_long(prompt_tokens: int | str, max_tokens: int | None, limit: int, param: str) -> ApiError:
    """The prompt, alone or with the tokens asked for, does not fit `limit` positions."""
    asked = f" and {max_tokens} for the answer" if max_tokens is not None else ""
    message = (
        f"This model's maximum context length is {limit} tokens, but {prompt_tokens} for the prompt{asked} were "
        f"requested. Shorten the prompt or ask for fewer tokens."
    )
    return ApiError(400, message, param, "context_length_exceeded")


def full() -> ApiError:
    return ApiError(429, "The server is full: as many requests as it takes are under way. Try again.", code="full")


def not_ready() -> ApiError:
    return ApiError(503, "The model is not ready: no engine replica answers yet.", code="not_ready")


def not_woken(seconds: float) -> ApiError:
    """For a request that waited so long for a model that slept."""
    message = f"The model slept, and no engine of it was up within {seconds:g} s. Try again; if that does not help, "
    message += "`serve status` says what its engine waits for, as a free node or GPU."
    return ApiError(503, message, code="not_ready")


def unavailable() -> ApiError:
    """Not even later: Serve starts no engine any more."""
    message = (
        "The model is not available: it failed to start, or is stopped. `serve status` or the server's log says why."
    )
    return ApiError(503, message, code="not_ready")


def model_changed() -> ApiError:
    """For a request that was read for a model whose engines are gone: to be read anew where no token was passed on."""
    return ApiError(503, "The model was replaced while this request waited. Try again.", code=MODEL_CHANGED)


def server_error() -> ApiError:
    return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


def from_request_error(error: RequestError) -> ApiError:
    return bad_request(str(error), error.param)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    # The branch of a union that was tried is no part of the name that a client would know.
    parts = [str(part) for part in first["loc"] if not (isinstance(part, str) and ("[" in part or "(" in part))]
    param = cause.param if isinstance(cause, FieldError) else cut(".".join(parts), MAX_NAME) or None
    message = SHAPES.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == "extra_forbidden":
        message = f"unknown field `{param}`"
    elif param and not message.startswith(param):
        message = f"{param}: {message}"
    return bad_request(cut(" ".join(message.splitlines()), MAX_MESSAGE), param)


def cut(text: str, most: int) -> str:
    """What is told of a client's own words."""
    return text if len(text) <= most else text[: most - 1] + "…"
