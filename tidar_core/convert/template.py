"""The chat template, taken apart: where a user's turn opens, and what ends it.

A chat model that is given its template up to the start of the user's words continues with a user's question
(Magpie, arXiv 2406.08464).
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

_SENTINEL = "Qz7TurnContentZq7"

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """tokens: the template up to the user's words. stop_ids: tokens that end them; stop: a string that does, where
    the template has no token for it."""

    tokens: tuple[int, ...]
    stop_ids: frozenset[int]
    stop: tuple[str, ...]


def open_user_turn(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], opening: str = "") -> OpenTurn | None:
    """The conversation `turns` with another user turn begun by `opening`; None where the model has no usable template.

    The boundary is found by rendering a turn that holds a sentinel and cutting there.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        text = _render(tokenizer, [*turns, {"role": "user", "content": _SENTINEL}], answer=False)
    except Exception:  # a template may refuse in any way it likes; then there is none for us
        return None
    before, found, after = text.rpartition(_SENTINEL)
    if not found:
        return None
    stop_ids, stop = _end_ids(tokenizer), tuple[str, ...]()
    ending = encode(tokenizer, after)
    if ending and ending[0] in _special_ids(tokenizer):
        stop_ids.add(ending[0])
    elif after.strip():
        stop = (after.strip(),)
    elif after:
        stop = (after,)
    return OpenTurn(encode(tokenizer, before + opening), frozenset(stop_ids), stop)


def answer_prompt(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> tuple[int, ...]:
    """The conversation `turns`, which ends with a user's, up to where the model's answer begins."""
    return encode(tokenizer, _render(tokenizer, turns, answer=True))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of rendered text, which has its special tokens in it already."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_start(tokenizer: PreTrainedTokenizerFast, opening: str) -> tuple[int, ...]:
    """Token ids of a text begun without a template: at least one, beginning-of-sequence where the model has it."""
    tokens = tuple(tokenizer(opening)["input_ids"])
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = (tokenizer.bos_token_id,)
    return tokens or encode(tokenizer, "A")


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...], skip_special: bool = False) -> str:
    """The text of token ids."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special))


def has_special(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> bool:
    return not _special_ids(tokenizer).isdisjoint(tokens)


def _render(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], answer: bool) -> str:
    rendered: Any = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer)
    return str(rendered)


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _end_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
