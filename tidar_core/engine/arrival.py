"""What a request must be for an engine to serve it, and the sequence that it becomes there."""

import time
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from tidar_core.engine.thought_watch import ThoughtWatch
from tidar_core.request import Request, RequestError, Sequence
from tidar_core.sampling.bad_words import BadWords, check_bad_words
from tidar_core.sampling.penalties import Ledger, check_allowed
from tidar_core.text import TextStream

if TYPE_CHECKING:
    from tidar_core.engine.engine import EngineInfo


def check_request(request: Request, info: "EngineInfo", tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises RequestError for a request that an engine can never serve."""
    params, known = request.params, len(request.prompt) + len(request.emitted)
    if not request.prompt:
        raise RequestError("the prompt is empty: send at least one token", "prompt")
    if not all(0 <= token < info.vocab_size for token in (*request.prompt, *request.emitted)):
        raise RequestError(_unknown_token((*request.prompt, *request.emitted), info.vocab_size, tokenizer), "prompt")
    if not all(0 <= token < info.vocab_size for token, _ in params.logit_bias):
        raise RequestError(f"logit_bias: ids must lie between 0 and {info.vocab_size - 1}", "logit_bias")
    check_allowed(params, info.vocab_size, info.eos_ids, info.mask_token)
    check_bad_words(params, info.vocab_size)
    wanted = len(request.prompt) + params.max_tokens
    if request.cut and len(request.prompt) < info.max_model_len:
        wanted = min(wanted, info.max_model_len)
    if wanted > info.max_model_len:
        raise RequestError(
            f"{len(request.prompt)} prompt tokens and {params.max_tokens} to generate exceed the "
            f"{info.max_model_len} positions of this model: shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    if known >= wanted:
        whole = len(request.emitted) >= params.max_tokens
        why = "all of max_tokens" if whole else f"all that the {wanted} positions of this engine hold"
        raise RequestError(f"{why} was emitted already", "max_tokens")
    if params.draft_trust < 1.0 and not info.block_length:
        raise RequestError("this model has no drafter whose drafts could be trusted", "tidar.draft_trust")


def sequence_of(request: Request, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Sequence:
    """A request as it is decoded, with all that follows its tokens."""
    params = request.params
    watch = None
    if params.stop:
        watch = TextStream(
            tokenizer,
            params.stop,
            request.emitted,
            params.min_tokens,
            params.mid_text,
            with_special=params.special_text,
        )
    ledger = Ledger(len(request.prompt)) if params.penalises else None
    tokens = [*request.prompt, *request.emitted]
    bad_words = BadWords(params.bad_words, len(request.prompt)) if params.bad_words else None
    sequence = Sequence(request, time.monotonic(), tokens, stop_watch=watch, ledger=ledger, bad_words=bad_words)
    if params.thought_limit is not None:
        sequence.constraint = ThoughtWatch(params.thought_limit, tokenizer, vocab_size, params.special_text)
        sequence.constraint.advance(request.emitted)
    return sequence


def _unknown_token(tokens: Items[int], vocab_size: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """The error for the first token without an embedding: a tokenizer may know more words than its model."""
    unknown = next(token for token in tokens if not 0 <= token < vocab_size)
    word = next((f" ({word!r})" for word, token in tokenizer.get_vocab().items() if token == unknown), "")
    return (
        f"token {unknown}{word} is none that the model has an embedding for: ids must lie between 0 and "
        f"{vocab_size - 1}"
    )
