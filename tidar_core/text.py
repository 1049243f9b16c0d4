"""From token ids to text as it grows, and the search for stop strings in it.

Two things make this more than a call of `decode`. A character may be spread over several tokens, so its bytes wait
until it is whole. And a stop string may be spread over several tokens too, so text that could be its beginning is
held back. Both work character by character with a fixed state, so an answer costs time linear in its length, and
what comes out does not depend on how the tokens were cut into runs.
"""

import codecs
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Protocol
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a run of tokens brought.

    text: what may be shown now. used: how many of the tokens count, up to and including the one that completed
    the stop string `stop`; all of them where `stop` is None.
    """

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """The text of one answer, token by token.

    Special tokens are left out, or spelled (`with_special`). The texts of all `push` calls and of `finish` together are
    `tokenizer.decode(tokens, skip_special_tokens=not with_special, clean_up_tokenization_spaces=False)`, cut before the
    stop string where one came up, or behind it (`with_stop`), and with the space in front that decoders of pieces take
    from a text's first word where it is `mid_text`: behind a text that is not among the tokens. (One exception:
    tokenizers that spell unknown characters in byte tokens, as SentencePiece does, decode a malformed run of them anew
    as a whole; here a character that was shown stays.)

    The stop that ends first wins; of several that end together, the longest. So the answer never depends on how the
    text was cut into tokens. `emitted` are tokens that were shown already: the state is as if they had been pushed. A
    stop string that one of the first `min_tokens` tokens completes is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop: tuple[str, ...] = (),
        emitted: Sequence[int] = (),
        min_tokens: int = 0,
        mid_text: bool = False,
        with_stop: bool = False,
        with_special: bool = False,
    ) -> None:
        hidden = () if with_special else special_texts(tokenizer)
        self._decoder = _decoder_for(tokenizer.backend_tokenizer, hidden, mid_text)
        self._matcher = _StopMatcher(stop, with_stop)
        self._deaf = min_tokens
        self.push(emitted)

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Append token ids. After a stop nothing comes any more: no text, no token used."""
        shown: list[str] = []
        for index, token in enumerate(tokens):
            if self._matcher.matched is not None:
                return Pushed("".join(shown), index, self._matcher.matched)
            shown.append(self._matcher.feed(self._decoder.feed(token), deaf=self._deaf > 0))
            self._deaf -= 1
        return Pushed("".join(shown), len(tokens), self._matcher.matched)

    def finish(self) -> str:
        """End the text: what was held back, with U+FFFD for bytes of a character that never became whole."""
        return self._matcher.feed(self._decoder.finish()) + self._matcher.finish()


def token_text(tokenizer: PreTrainedTokenizerFast, token: int) -> str:
    """The text of one token within a text; U+FFFD where it is a part of a character."""
    backend = tokenizer.backend_tokenizer
    before = () if isinstance(backend.decoder, decoders.ByteLevel) else _plain_letter(backend)
    text: str = backend.decode([*before, token], skip_special_tokens=False)
    return text[len(before) :]


def token_bytes(tokenizer: PreTrainedTokenizerFast, token: int) -> bytes:
    """The bytes that one token stands for; several tokens may share a character."""
    backend = tokenizer.backend_tokenizer
    piece = backend.id_to_token(token)
    if piece is None:
        return b""
    if isinstance(backend.decoder, decoders.ByteLevel):
        if all(char in BYTE_OF_CHAR for char in piece):
            return bytes(BYTE_OF_CHAR[char] for char in piece)
    elif byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return token_text(tokenizer, token).encode()


class _StopMatcher:
    """Searches a growing text for stop strings, by Knuth, Morris and Pratt's automaton, one for each string."""

    def __init__(self, stops: tuple[str, ...], with_stop: bool) -> None:
        self.matched: str | None = None
        self._with_stop = with_stop
        self._held = ""  # the longest end of the text that begins a stop string
        self._stops = tuple((stop, _borders(stop)) for stop in stops)
        self._lengths = [0] * len(stops)  # of each stop string, how much the text ends with

    def feed(self, text: str, deaf: bool = False) -> str:
        """Append text; return what can be shown: nothing of a stop string that is still possible, all or nothing of one
        that was found. Where it is deaf, a stop string that ends in this text is none, but one may begin."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        waiting = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = self._advance(char, deaf)
            if found is not None:
                self.matched = found
                self._held = ""
                return waiting[: end if self._with_stop else end - len(found)]
        shown = len(waiting) - max(self._lengths)
        self._held = waiting[shown:]
        return waiting[:shown]

    def finish(self) -> str:
        """Let go of the text that only began a stop string."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held

    def _advance(self, char: str, deaf: bool) -> str | None:
        """Read one character; return the longest stop string that it completes, if any."""
        found: str | None = None
        for index, (stop, borders) in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            self._lengths[index] = length
            if length == len(stop) and deaf:
                self._lengths[index] = borders[length - 1]
            elif length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders


class _Decoder(Protocol):
    def feed(self, token: int) -> str: ...

    def finish(self) -> str: ...


def _decoder_for(backend: Tokenizer, hidden: Container[int], mid_text: bool) -> _Decoder:
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _ByteDecoder(backend, hidden)
    return _PieceDecoder(backend, hidden, mid_text)


def special_ids(backend: Tokenizer) -> frozenset[int]:
    """The tokens that are no text."""
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


_special: WeakKeyDictionary[PreTrainedTokenizerFast, Mapping[int, str]] = WeakKeyDictionary()


def special_texts(tokenizer: PreTrainedTokenizerFast) -> Mapping[int, str]:
    """The same and how each is written, of a tokenizer that changes no more: read once, since a thousand added tokens
    take milliseconds, and each choice of an answer asks."""
    if tokenizer not in _special:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        _special[tokenizer] = {token: entry.content for token, entry in added.items() if entry.special}
    return _special[tokenizer]


def _byte_of_char() -> dict[str, int]:
    """The byte behind each character of a byte-level token (GPT-2's table).

    Visible Latin-1 characters stand for their own byte, and U+0100 onwards for the remaining bytes in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # as SentencePiece names a byte


class _ByteDecoder:
    """Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM): a token is bytes, whatever stands around it.

    Not tokenizers' own DecodeStream: behind a byte that never becomes a character it decodes everything since anew
    for each token, and it shows nothing until a clean character comes.
    """

    def __init__(self, backend: Tokenizer, hidden: Container[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        piece = None if token in self._hidden else self._backend.id_to_token(token)
        if piece is None:  # a token that is not shown, or a padding row of the embedding that has none
            return ""
        try:
            data = bytes([BYTE_OF_CHAR[char] for char in piece])
        except KeyError:  # an added token is plain text
            data = piece.encode()
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoder:
    """Any other tokenizer (SentencePiece with byte tokens, WordPiece, …): decodes the few tokens not shown yet.

    Such decoders treat the first token of a text in a way of its own (a leading space goes), so in the midst of a text,
    and once something was shown, a plain letter stands in for all that comes before.
    """

    _LONGEST_CHARACTER = 4  # in bytes, and so in tokens

    def __init__(self, backend: Tokenizer, hidden: Container[int], mid_text: bool) -> None:
        self._backend = backend
        self._hidden = hidden
        self._pending: list[int] = []
        self._before: tuple[int, ...] = _plain_letter(backend) if mid_text else ()

    def feed(self, token: int) -> str:
        if token in self._hidden or self._backend.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._text()
        # A longer run that still ends badly is malformed: waiting would not mend it.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < self._LONGEST_CHARACTER:
            return ""
        return self._let_go(text)

    def finish(self) -> str:
        return self._let_go(self._text()) if self._pending else ""

    def _text(self) -> str:
        return self._backend.decode([*self._before, *self._pending], skip_special_tokens=False)[len(self._before) :]

    def _let_go(self, text: str) -> str:
        self._pending.clear()
        if not self._before:
            self._before = _plain_letter(self._backend)
        return text


def _plain_letter(backend: Tokenizer) -> tuple[int, ...]:
    """The id of a token that is one letter, in a tuple; empty where the vocabulary has none."""
    ids = (backend.token_to_id(letter) for letter in ascii_letters)
    return next(((token,) for token in ids if token is not None), ())
