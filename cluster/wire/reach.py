"""How long a text can be whose tokens are no more than so many: what is certainly too long need not be tokenized, at a
second for each megabyte."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, models

from cluster.card import ModelCard
from cluster.errors import too_long
from tidar_core.text import BYTE_OF_CHAR

if TYPE_CHECKING:  # as for `ModelCard`
    from transformers import PreTrainedTokenizerFast

# Of a text beyond ASCII, how many of its bytes may become one: three, as of Kelvin's sign, and one for safety.
NORMALIZED: Mapping[str, int] = {"NFC": 4, "NFD": 4, "Prepend": 1, "ByteLevel": 1}
KEEPS_ALL = frozenset({"ByteLevel", "Digits", "Metaspace"})
NEVER_SPELT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # bytes that no text has in UTF-8
NEVER_JOINED = frozenset((*range(0x80), *range(0xF1, 0x100)))  # those of characters that no normalizer here changes


@dataclass(frozen=True, slots=True)
class Reach:
    """How many bytes of a text one token stands for at most: longest, where that is ASCII, else `shrinks` times as
    many. left_out: bytes that have no token and are skipped."""

    longest: int
    shrinks: int
    left_out: frozenset[int] = frozenset()

    def least(self, text: str) -> int:
        """How many tokens a text has at least, but for a rest."""
        raw = text.encode()
        spelt = len(raw) - sum(map(raw.count, self.left_out))
        return spelt // (self.longest if text.isascii() else self.longest * self.shrinks)


_known: WeakKeyDictionary["PreTrainedTokenizerFast", Reach | None] = WeakKeyDictionary()


def check_reach(text: str, card: ModelCard, param: str) -> None:
    """Raises ApiError (400) for a text that has more tokens than the model has positions, however it is tokenized."""
    if len(text) <= card.max_model_len:
        return
    if card.tokenizer not in _known:
        _known[card.tokenizer] = reach_of(card.tokenizer.backend_tokenizer)
    reach = _known[card.tokenizer]
    least = 0 if reach is None else reach.least(text)
    if least > card.max_model_len:
        raise too_long(f"at least {least}", None, card.max_model_len, param)


def reach_of(backend: Tokenizer) -> Reach | None:
    """None where a token may stand for any number of characters, or it is not known that none does."""
    cuts, shrinks = list(parts_of(backend.pre_tokenizer)), normalizers_shrink(backend)
    kept = all(cut["type"] in KEEPS_ALL or (cut["type"] == "Split" and cut["behavior"] != "Removed") for cut in cuts)
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    takes_more = any(one.lstrip or one.rstrip or (one.normalized and not one.content.isascii()) for one in added)
    if shrinks is None or not kept or takes_more or not isinstance(model, models.BPE):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    pieces = backend.get_vocab(with_added_tokens=False)
    longest = max((len(one.content.encode()) for one in added), default=1)
    if any(cut["type"] == "ByteLevel" for cut in cuts):
        left_out = frozenset(byte for letter, byte in BYTE_OF_CHAR.items() if letter not in pieces) - NEVER_SPELT
        return Reach(max(longest, *map(len, pieces)), shrinks, left_out) if left_out <= NEVER_JOINED else None
    if not model.byte_fallback or not all(f"<0x{byte:02X}>" in pieces for byte in range(0x100)):
        return None  # a run of unknown characters is one token, or none
    return Reach(max(longest, *(len(piece.encode()) for piece in pieces)), shrinks)


def normalizers_shrink(backend: Tokenizer) -> int | None:
    """How many bytes of a text may become one; None where that has no limit, or may have none."""
    shrinks = 1
    for form in parts_of(backend.normalizer):
        if form["type"] == "Replace":
            replaced = form["pattern"].get("String")
            if replaced is None or len(form["content"].encode()) < len(replaced.encode()):
                return None
        elif form["type"] in NORMALIZED:
            shrinks *= NORMALIZED[form["type"]]
        else:
            return None
    return shrinks


def parts_of(component: Any) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of, in tokenizers' own words."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        one = waiting.pop()
        if one["type"] == "Sequence":
            waiting += one.get("normalizers") or one.get("pretokenizers") or []
        else:
            yield one
