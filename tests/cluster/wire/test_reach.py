"""Texts that are refused unread are too long, whatever the tokenizer makes of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.errors import ApiError
from cluster.ingress.plans import chat_plan, completion_plan, responses_plan
from cluster.wire import prompts
from cluster.wire.prompts import encode
from cluster.wire.reach import reach_of
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import END_OF_TEXT, tiny_tokenizer


def byte_level(normalizer: Any = None) -> Tokenizer:
    backend = tiny_tokenizer().backend_tokenizer
    backend.normalizer = normalizer
    return backend


def without(left_out: str) -> Tokenizer:
    """One that has no token for the bytes of these characters, as SmolLM's has none for some."""
    model = models.BPE(
        {letter: n for n, letter in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*left_out}))}, []
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def pieces(fallback: bool = True) -> Tokenizer:
    """As SentencePiece's, with tokens of bytes for what is unknown."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "aa", "aaaa", "\u2581a"]
    merges = [("a", "a"), ("aa", "aa"), ("\u2581", "a")]
    model = models.BPE(
        {piece: n for n, piece in enumerate(known)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.ByteFallback()
    return backend


LIMITED = {
    "byte level": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "decomposed": byte_level(normalizers.NFD()),
    "left out": without("\u0104\u0106\u00f1\u00f2"),
    "pieces": pieces(),
}
COMPOSED = ("e\u0301", "\u212a", "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8")
OTHERS = ("a", "aaaa", " ", "\n", "the", "\x04", "\x06", "\u65e5", "\U0001f600", "\U00050001", END_OF_TEXT)
letters = st.sampled_from((*COMPOSED, *OTHERS))


@pytest.mark.parametrize("name", LIMITED)
@given(text=st.lists(letters | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join))
def test_a_text_has_the_tokens_that_it_is_said_to_have_at_least(name: str, text: str) -> None:
    reach = reach_of(LIMITED[name])
    assert reach is not None
    assert reach.least(text) <= len(encode(LIMITED[name], text, False))
    assert reach.least("1" * 10_000) > 100, "a limit that is never reached is none"


def spaced(**takes: bool) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", **takes)])
    return backend


def cut_by(pre_tokenizer: Any) -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (byte_level(normalizers.Strip()), " " * 500 + "a"),
        (byte_level(normalizers.Replace(Regex("a+"), "a")), "a" * 500),
        (byte_level(normalizers.Replace("aa", "")), "a" * 500),
        (byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])), "a" + "\u0301" * 500),
        (cut_by(pre_tokenizers.Whitespace()), " " * 500),
        (cut_by(pre_tokenizers.Split("a", "removed")), "a" * 500),
        (spaced(lstrip=True), " " * 500 + "<mask>"),
        (spaced(rstrip=True), "<mask>" + " " * 500),
        (pieces(fallback=False), "x" * 500),
        (without("a"), "a" * 500),
        (Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "b" * 500),
    ],
)
def test_where_few_tokens_may_stand_for_any_text_nothing_is_said_of_it(backend: Tokenizer, text: str) -> None:
    reach, tokens = reach_of(backend), len(encode(backend, text, False))
    assert tokens < 20
    assert reach is None or reach.least(text) <= tokens


CARD = card_for(tiny_tokenizer())
LONG = "1" * 5000


def plan(kind: Any, *arguments: Any, **fields: Any) -> Any:
    return kind(fields, CARD, CARD.tokenizer.backend_tokenizer, *arguments)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (lambda: plan(completion_plan, prompt=["a", LONG]), "prompt"),
        (lambda: plan(chat_plan, False, messages=[{"role": "user", "content": LONG}]), "messages"),
        (lambda: plan(responses_plan, False, input=LONG), "input"),
    ],
)
def test_what_is_certainly_too_long_is_refused_before_it_is_tokenized(
    asked: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(ApiError, match=r"maximum context length is 64 tokens, but at least 38\d") as caught:
        asked()
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "context_length_exceeded")


def test_of_a_long_text_the_end_may_count() -> None:
    assert plan(completion_plan, prompt=LONG, truncate_prompt_tokens=5).prompts == [
        (*encode(LIMITED["byte level"], LONG, False)[-5:],)
    ]


def test_a_tokenizers_reach_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PreTrainedTokenizerFast] = []
    monkeypatch.setattr("cluster.wire.reach.reach_of", asked.append)
    card = card_for(tiny_tokenizer())
    for text in ("a" * 64, LONG, LONG):
        prompts.check_reach(text, card, "prompt")
    assert len(asked) == 1
