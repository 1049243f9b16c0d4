"""The API's own OpenAPI document, made of the bodies that it reads and OpenAI's types that it answers with."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.wire.responses_asked import ResponsesBody
from cluster.wire.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

REF = "#/components/schemas/"
BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ANSWERS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
PLAIN_TEXT = ("/health", "/metrics")
ERRORS: Mapping[int, str] = {
    400: "The request cannot be honoured; `param` names the field at fault.",
    401: "A key is wanted.",
    404: "There is no such model.",
    408: "The body stopped coming.",
    413: "The body is too large.",
    415: "The body is compressed, or not said to be JSON: the header Content-Type says `application/json`.",
    429: "The server is full; Retry-After says when to try again.",
    503: "No engine answers, or the one that did was lost; Retry-After says when to try again.",
}
OF_BODIES = (400, 408, 413, 415)
# Of each event: a chunk of the answer as JSON, or [DONE].
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI, wants_key: Callable[[str], bool]) -> dict[str, Any]:
    """The document of an application's routes; `wants_key` says of a path whether it wants one."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = made.setdefault("components", {})["schemas"] = schemas_of_bodies()
    schemas["Error"] = ERROR_SCHEMA
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            body = BODIES.get(path)
            if body is not None:
                content = {"application/json": {"schema": {"$ref": REF + body.__name__}}}
                operation["requestBody"] = {"required": True, "content": content}
            guarded = wants_key(path)
            operation["responses"] = responses(path, guarded)
            operation["security"] = [{"key": []}] if guarded else []
    return made


def schemas_of_bodies() -> dict[str, Any]:
    """Schemas of all bodies, by name."""
    asked = [(body, "validation") for body in BODIES.values()]
    answered = [(answer, "serialization") for answer in ANSWERS.values()]
    _, found = models_json_schema([*asked, *answered], ref_template=REF + "{model}")  # type: ignore[list-item]  # literals
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def responses(path: str, guarded: bool) -> dict[str, Any]:
    answer = ANSWERS.get(path)
    if path in PLAIN_TEXT:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        schema = {"$ref": REF + answer.__name__} if answer is not None else {"type": "object"}
        content = {"application/json": {"schema": schema}}
    if answer is not None:
        content["text/event-stream"] = {"schema": EVENT}
    told: dict[str, Any] = {"200": {"description": "What was asked for.", "content": content}}
    error = {"application/json": {"schema": {"$ref": REF + "Error"}}}
    for status, meaning in ERRORS.items():
        if (status == 401 and not guarded) or (status in OF_BODIES and path not in BODIES):
            continue
        if (status == 404 and (path in PLAIN_TEXT or path == "/v1/models")) or (status == 429 and answer is None):
            continue
        plain = status == 503 and path == "/health"
        told[str(status)] = {"description": meaning, "content": {"text/plain": {}} if plain else error}
    return told
