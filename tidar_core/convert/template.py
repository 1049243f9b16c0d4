"""The chat template, taken apart: where a user's turn opens, and what ends it.

A chat model that is given its template up to the start of the user's words continues with a user's question
(Magpie, arXiv 2406.08464).
"""

from dataclasses import dataclass
from functools import lru_cache
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


def open_user_turn(
    tokenizer: PreTrainedTokenizerFast, turns: list[Turn], opening: str = "", thinks: bool = True
) -> OpenTurn | None:
    """The conversation `turns` with another user turn begun by `opening`; None where the model has no usable template.

    The boundary is found by rendering a turn that holds a sentinel and cutting there. The rendering asks for an answer:
    in some templates nothing but what begins one tells that a user's words are over.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        text = _render(tokenizer, [*turns, {"role": "user", "content": _SENTINEL}], thinks)
    except Exception:  # a template may raise anything to refuse; then it is of no use here
        return None
    before, found, after = text.rpartition(_SENTINEL)
    if not found:
        return None
    stop_ids, stop = _end_ids(tokenizer), tuple[str, ...]()
    ending = after.strip()
    first = encode(tokenizer, ending)[:1]
    if has_special(tokenizer, first) or _added(tokenizer).intersection(first):
        stop_ids.update(first)
    elif ending:
        stop = (ending.splitlines()[0].strip(),)
    elif "\n" in after:
        stop = ("\n",)
    return OpenTurn(encode(tokenizer, before + opening), frozenset(stop_ids), stop)


def answer_prompt(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], thinks: bool = True) -> tuple[int, ...] | None:
    """The conversation `turns`, which ends with a user's, up to where the model's answer begins; None where the
    template refuses it. thinks: whether a model that does so may think before it."""
    try:
        return encode(tokenizer, _render(tokenizer, turns, thinks))
    except Exception:  # as above
        return None


def can_chat(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the model has a template by which it is asked and answers."""
    if open_user_turn(tokenizer, []) is None:
        return False
    return answer_prompt(tokenizer, [{"role": "user", "content": _SENTINEL}]) is not None


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of rendered text, which has its special tokens in it already."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_start(tokenizer: PreTrainedTokenizerFast, opening: str) -> tuple[int, ...]:
    """Token ids of a text that begins with `opening`, without a template. At least one: for an empty text it is the
    beginning-of-sequence token, or any other where the tokenizer has none."""
    tokens = text_lead(tokenizer) + encode(tokenizer, opening)
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = (tokenizer.bos_token_id,)
    return tokens or encode(tokenizer, "A") or (0,)


def text_lead(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before every text: none, or beginning-of-sequence."""
    started, words = tuple(tokenizer("A")["input_ids"]), encode(tokenizer, "A")
    if words and words[0] in started:
        return started[: started.index(words[0])]
    return started[:1] if started[:1] == (tokenizer.bos_token_id,) else ()


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...], skip_special: bool = False) -> str:
    """The text of token ids."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special))


def has_special(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> bool:
    """Whether there is a special token among them. Decoding tells: to list those of a large vocabulary takes long."""
    return decode(tokenizer, tokens) != decode(tokenizer, tokens, skip_special=True)


@lru_cache(maxsize=4)
def _added(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Its added tokens, which no other text becomes; those of roles need not be special ones. A list of them takes too
    long to be made for each turn."""
    return frozenset(tokenizer.added_tokens_decoder)


def _render(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], thinks: bool) -> str:
    """The conversation up to where the model's answer begins."""
    # Templates of models that do not think ignore this variable.
    variables: dict[str, Any] = {} if thinks else {"enable_thinking": False}
    rendered: Any = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables)
    return str(rendered)


def _end_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
