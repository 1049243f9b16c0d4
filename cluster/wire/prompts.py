"""Bodies to token ids. Slow for long texts: the caller runs these in a thread."""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.errors import ApiError, bad_request, from_validation
from cluster.wire.messages import Templated
from cluster.wire.reach import check_reach
from cluster.wire.schemas import ChatBody, CompletionBody
from cluster.wire.tools import TEMPLATE_ERRORS, tool_format
from tidar_core.error_text import unbroken

BodyT = TypeVar("BodyT", bound=BaseModel)
CONTINUATION = "continue_final_message"
TAKEN = ("messages", "conversations", "self")  # beside what `apply_chat_template` names
MAX_WHY = 300  # characters of what a template says of the messages that it refuses


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ApiError (400) for anything that is not UTF-8 and strict JSON."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, parse_constant=refuse_constant)
        # A lone surrogate is legal JSON and no text; it would fail much later, in the tokenizer or the answer.
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise bad_request("the body's JSON is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise bad_request("the body has a lone surrogate, which is no text") from error
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    except ValueError as error:  # Python's limit of the digits of a whole number
        raise bad_request("the body has a number of too many digits") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def refuse_constant(name: str) -> float:
    raise bad_request(f"the body is not JSON: {name} is not a JSON number")


def read_body(value: Mapping[str, Any], kind: type[BodyT]) -> BodyT:
    """A checked request body. Raises ApiError (400) that names the first field at fault."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from error


def encode(backend: Tokenizer, text: str, special: bool) -> tuple[int, ...]:
    """Its token ids. As a batch of one: other threads run meanwhile, which `encode` alone would hold up."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
    return tuple(encoding.ids)


def encode_end(backend: Tokenizer, text: str, special: bool, most: int | None) -> tuple[int, ...]:
    """The last `most` token ids of a text, all where that is None. Those that the tokenizer sets in front of every text
    are kept, and count."""
    ids = encode(backend, text, special)
    if most is None or len(ids) <= most:
        return ids
    front = encode(backend, "", True) if special else ()
    if len(front) >= most or ids[: len(front)] != front:
        front = ()
    return (*front, *end_of(ids, most - len(front)))


def end_of(ids: tuple[int, ...], most: int | None) -> tuple[int, ...]:
    return ids if most is None else ids[-most:]


def decode(backend: Tokenizer, ids: Sequence[int]) -> str:
    """Their text, special tokens too; as a batch for the same reason."""
    (text,) = backend.decode_batch([list(ids)], skip_special_tokens=False)
    return str(text)


def render_chat(card: ModelCard, body: Templated) -> str:
    """A body's messages in the model's own chat template. Raises ApiError (400) where there is none, it refuses, or it
    changes the message that shall be gone on with."""
    if card.tokenizer.chat_template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    messages, tools, begun = body.messages or [], body.offered_tools, body.begun_answer
    form = tool_format(card.tokenizer) if tools else None
    if any(message.is_of_tools for message in messages):
        form = tool_format(card.tokenizer, "messages")  # other templates leave calls out without a word
    short_ids = form is not None and form.short_ids
    for name in body.chat_template_kwargs or ():
        if name in TAKEN or name in signature(card.tokenizer.apply_chat_template).parameters:
            what = f"chat_template_kwargs: `{name[:40]}` is no argument of a template"
            raise bad_request(f"{what}, see the fields of the request", "chat_template_kwargs")
    try:
        text = card.tokenizer.apply_chat_template(
            [message.for_template(short_ids) for message in messages],
            tools=[tool.for_template() for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=body.add_generation_prompt is not False and begun is None,
            continue_final_message=begun is not None,
            **body.template_arguments,
        )
    except RecursionError as error:
        raise bad_request("the messages or tools are nested too deeply", "messages") from error
    except TEMPLATE_ERRORS as error:
        why = unbroken(str(error))
        if why.startswith(CONTINUATION):  # transformers, with the whole chat behind it
            raise not_as_it_was() from error
        raise bad_request(f"the model's chat template refused the messages: {why[:MAX_WHY]}", "messages") from error
    if begun is not None and not str(text).rstrip().endswith(begun.strip()):
        raise not_as_it_was()
    return str(text)


def not_as_it_was() -> ApiError:
    what = f"{CONTINUATION}: this model's chat template changes the last message, so that no answer can go on with it"
    return bad_request(f"{what}; leave out what it changes, thoughts for instance", CONTINUATION)


def most_tokens(wanted: int | None, card: ModelCard, limit: int | None = None) -> int | None:
    """How many tokens of a prompt count at most, by `truncate_prompt_tokens` and how many its answer may have."""
    return max(1, card.max_model_len - max(1, limit or 1)) if wanted == -1 else wanted


def completion_prompts(body: CompletionBody, card: ModelCard, backend: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids of each prompt. Raises ApiError (400) for an empty prompt, a text that is certainly too long, or an id
    that the model does not know."""
    special = body.add_special_tokens is not False
    most = most_tokens(body.truncate_prompt_tokens, card, body.limit)
    for text in body.prompt:
        if isinstance(text, str) and most is None:
            check_reach(text, card, "prompt")
    prompts = [
        encode_end(backend, prompt, special, most) if isinstance(prompt, str) else end_of(prompt, most)
        for prompt in body.prompt
    ]
    for prompt in prompts:
        if not prompt:
            raise bad_request("prompt must not be empty", "prompt")
        check_ids(prompt, card, "prompt")
    return prompts


def chat_prompt(body: ChatBody, card: ModelCard, backend: Tokenizer) -> tuple[tuple[int, ...], str]:
    """Token ids of a chat, and its text, of which they may be the end. Raises ApiError (400) as `render_chat` does,
    or where that is certainly too long."""
    text = render_chat(card, body)
    most = most_tokens(body.truncate_prompt_tokens, card, body.limit)
    if most is None:
        check_reach(text, card, "messages")
    prompt = encode_end(backend, text, bool(body.add_special_tokens), most)
    if not prompt:
        raise bad_request("the chat template made an empty prompt of the messages", "messages")
    return prompt, text


def check_ids(ids: tuple[int, ...] | list[int], card: ModelCard, param: str) -> None:
    """Raise ApiError (400) for a token id outside the model's vocabulary."""
    for token in ids:
        if not 0 <= token < card.vocab_size:
            raise bad_request(f"token id {token} is outside the vocabulary of {card.vocab_size} tokens", param)
