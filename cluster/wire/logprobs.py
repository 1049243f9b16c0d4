"""Log-probabilities on the wire, in the forms of OpenAI's two endpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tidar_core.request import TokenLogprobs

Spell = Callable[[int], str]


def chat_logprobs(
    entries: Sequence[TokenLogprobs], spell: Spell, bytes_of: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """`content` of a chat choice's `logprobs`, as OpenAI's `ChatCompletionTokenLogprob` has it: each token with its
    likeliest rivals. The `bytes` of all tokens joined are the answer's, where a token is but a part of a character too;
    a stop string at its end is among them."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spell(token), "bytes": list(bytes_of(token)), "logprob": logprob}

    return [
        {**told(entry.token, entry.logprob), "top_logprobs": [told(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def by_id(token: int) -> str:
    """How vLLM names a token with `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def by_text(spell: Spell, bytes_of: Callable[[int], bytes]) -> Spell:
    """How OpenAI names tokens in completions: a part of a character by its bytes, lest different ones share a key."""

    def name(token: int) -> str:
        text = spell(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_of(token))

    return name


def completion_logprobs(
    entries: Sequence[TokenLogprobs], spell: Spell, name: Spell, offset: int, leading: int | None = None
) -> dict[str, Any]:
    """`logprobs` of a completion choice, as OpenAI's `Logprobs` has it. `offset`: characters before the first of these
    tokens, each spelled by itself. `name`: how they are called. `leading`: a token in front that has no
    log-probability, which no type of OpenAI's allows, though its server said null there. Each token is among its own
    `top_logprobs`, likely or not."""
    front = [] if leading is None else [leading]
    tokens = [*front, *(entry.token for entry in entries)]
    texts = [spell(token) for token in tokens]
    untold = [None] * len(front)
    top = [{name(token): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))} for entry in entries]
    return {
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        "token_logprobs": [*untold, *(entry.logprob for entry in entries)],
        "tokens": [name(token) for token in tokens],
        "top_logprobs": [*untold, *top],
    }


def with_likeliest(entries: Sequence[TokenLogprobs], count: int) -> list[TokenLogprobs]:
    """The entries with at most so many of the likeliest tokens: more were asked for elsewhere."""
    return [replace(entry, top=entry.top[:count]) for entry in entries]


def prompt_logprobs(entries: Sequence[TokenLogprobs], spell: Spell) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first itself and the likeliest, by id."""
    told: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        told.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": spell(token)}
                for token, logprob, rank in ((entry.token, entry.logprob, entry.rank), *ranked)
            }
        )
    return told
