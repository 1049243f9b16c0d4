"""What a model thinks before it answers, told apart from the answer.

Models that think aloud (Qwen3, DeepSeek-R1's distillations, SmolLM3, EXAONE 4, Seed-OSS) write it in front of the
answer, between two tags. Their templates cut it out of earlier turns, or leave the first tag open for the
answer to go on from, so that a template tells whether a model does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.errors import bad_request
from tidar_core.grammar.grammar import Grammar, tag_grammar
from tidar_core.grammar.schemas import GrammarError
from tidar_core.request import ThoughtLimit

if TYPE_CHECKING:  # as for `ModelCard`
    from transformers import PreTrainedTokenizerFast

BUDGET = "thinking_token_budget"
_TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"))


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that a model thinks, and does not answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer may begin with thoughts: its tags, and the token of the second, where it is one. begun: the prompt
    has the first already. amid: words of thoughts too, with which the answer goes on."""

    begin: str
    end: str
    end_id: int | None
    begun: bool
    amid: bool = False

    def parser(self) -> "ThoughtParser":
        """For one answer."""
        return ThoughtParser(self)


class Tags(NamedTuple):
    """Between what a model thinks, and the token of the second, where it is one."""

    begin: str
    end: str
    end_id: int | None


def tags(tokenizer: "PreTrainedTokenizerFast") -> Tags | None:
    """None where the model's template knows of no thoughts, or the tags are special tokens, which are no text or one
    that shall have them as they are."""
    template = tokenizer.chat_template
    known = [pair for pair in _TAGS if isinstance(template, str) and pair[1] in template]
    if not known:
        return None  # before all added tokens are read: some models have thousands
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    pairs = (pair for pair in known if not any(tag in added and added[tag][1] for tag in pair))
    return next((Tags(begin, end, added.get(end, (None,))[0]) for begin, end in pairs), None)


def thinking(tokenizer: "PreTrainedTokenizerFast", prompt: str, begun_answer: str | None = None) -> Thinking | None:
    """None where the model does not think aloud, or where a prompt, as its template rendered it, has thought already.

    begun_answer: the part of the answer that stands in the prompt, where the answer goes on from there. Tags count only
    at its beginning, as in an answer.
    """
    found = tags(tokenizer)
    if found is None:
        return None
    begin, end, end_id = found
    before = prompt.rstrip()
    if begun_answer is not None:
        first, tag, thought = begun_answer.partition(begin)
        if first.strip() or not tag or end in thought:
            return None
        return Thinking(begin, end, end_id, begun=True, amid=bool(thought.strip()))
    return None if before.endswith(end) else Thinking(begin, end, end_id, before.endswith(begin))


def thought_limit(
    tokenizer: "PreTrainedTokenizerFast", thinking: Thinking | None, tokens: int | None
) -> ThoughtLimit | None:
    """How long the thoughts of an answer may be that may begin with them as `thinking` says; None where it does not, or
    they may be of any length (None, -1). Raises ApiError (400) where the server cannot tell this model's apart."""
    if tokens is None or tokens == -1:
        return None
    if tokens < 0:
        raise bad_request(f"{BUDGET} must be -1 (no limit) or more", BUDGET)
    if thinking is not None:
        return ThoughtLimit(thinking.begin, thinking.end, thinking.begun, tokens)
    if tags(tokenizer) is None:
        message = f"this model has no reasoning section the server can recognize, so {BUDGET} cannot be applied"
        raise bad_request(message, BUDGET)
    return None


def behind_thoughts(grammar: Grammar, thinking: Thinking, field: str) -> Grammar:
    """What an answer has to follow that may think before it follows `grammar`, which `field` asks for. Raises ApiError
    (400)."""
    thought: Any = {
        "type": "sequence",
        "elements": [
            {"type": "any_text", "excludes": [thinking.end]},
            {"type": "const_string", "value": thinking.end},
            {"type": "regex", "pattern": r"[ \t\r\n]*"},
        ],
    }
    if not thinking.begun:
        thought["elements"].insert(0, {"type": "const_string", "value": thinking.begin})
        thought = {"type": "optional", "content": thought}
    try:
        form = {"type": "sequence", "elements": [thought, _as_format(grammar)]}
        return tag_grammar(form, grammar.parts or ((field, grammar),))
    except GrammarError as error:
        raise bad_request(f"{field}: {error}", field) from error


def _as_format(grammar: Grammar) -> Any:
    """A grammar as a part of a structural tag."""
    if grammar.kind == "structural_tag":
        return json.loads(grammar.text)["format"]
    if grammar.kind in ("json_schema", "json_object"):
        return {"type": "json_schema", "json_schema": json.loads(grammar.text or '{"type": "object"}')}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    return {"type": "grammar", "grammar": grammar.text}


class ThoughtParser:
    """Splits an answer into thoughts and text. What all `push` calls and `finish` bring together does not depend on how
    the answer was cut. White space around thoughts is nobody's, but for that behind words said before.

    tokens: how many of the answer's were thoughts, tags among them, as far as `count` was told of it.
    """

    def __init__(self, thinking: Thinking):
        self.tokens = 0
        self._thinking = thinking
        self._held = ""  # of which it is not known yet what it is
        self._told: list[str | Thought] = []
        self._lead = not thinking.amid  # white space before the first thought
        self._thought = False
        self._counted = 0  # tokens until the end of thoughts, which their text tells later
        self._ended = False
        self._step = self._in_thought if thinking.amid else self._before

    def count(self, tokens: Sequence[int]) -> None:
        """Count tokens, behind the `push` of their text. One at a time where the end of thoughts shows in that alone:
        those behind it are none of them."""
        if not self._ended:
            self._ended = self._thinking.end_id in tokens or (self._thinking.end_id is None and self.over)
            own = self._thinking.end_id
            self._counted += tokens.index(own) + 1 if own is not None and own in tokens else len(tokens)
        self.tokens = self._counted if self._thought or self._thinking.begun else 0

    @property
    def within(self) -> bool:
        """What was pushed last is of thoughts, or of the white space behind them."""
        return self._step in (self._in_thought, self._behind)

    @property
    def over(self) -> bool:
        """No more thoughts come."""
        return self._step in (self._behind, self._in_text)

    def push(self, text: str) -> tuple[str | Thought, ...]:
        """Append text; return what of it can be shown, in order."""
        self._held += text
        while self._held and self._step():
            pass
        return self._out()

    def finish(self) -> tuple[str | Thought, ...]:
        """End the answer."""
        if self._step == self._in_thought:
            self._tell(Thought(self._held))
        elif self._step != self._behind:
            self._tell(self._held)
        self._held = ""
        return self._out()

    def _out(self) -> tuple[str | Thought, ...]:
        told, self._told = tuple(self._told), []
        return told

    # Each step takes from the front of `_held` what it understands; False where it needs more to tell.

    def _before(self) -> bool:
        begin, begun, waiting = self._thinking.begin, self._thinking.begun, self._held.lstrip()
        if waiting.startswith(begin):
            self._held = waiting[len(begin) :]
        elif begin.startswith(waiting):
            return False
        elif not begun:
            self._step = self._in_text
            return True
        self._thought = True
        self._step = self._in_thought
        return True

    def _in_thought(self) -> bool:
        if self._lead:
            self._held = self._held.lstrip()
            self._lead = not self._held
        end = self._thinking.end
        place = self._held.find(end)
        if place >= 0:
            self._tell(Thought(self._held[:place].rstrip()))
            self._held = self._held[place + len(end) :]
            self._step = self._behind
            return True
        begun = next(length for length in range(len(end) - 1, -1, -1) if self._held.endswith(end[:length]))
        shown = len(self._held[: len(self._held) - begun].rstrip())
        self._tell(Thought(self._held[:shown]))
        self._held = self._held[shown:]
        return False

    def _behind(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._in_text
        return bool(self._held)

    def _in_text(self) -> bool:
        self._tell(self._held)
        self._held = ""
        return False

    def _tell(self, part: str | Thought) -> None:
        if part and (isinstance(part, str) or part.text):
            self._told.append(part)
