"""How text is cut by a GGUF file's vocabulary, by the name that the file gives."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from tidar_core.config import ConfigError
from tidar_core.model import splits
from tidar_core.model.gguf import GgufHeader

TEXT = "It's 1234.5 km,  DON'T\r\n\n  say naïve çà ÉTÉ x² Ⅷ 한국어 中文字 //\t{}\n"
KNOWN_TO_BOTH = sorted(set(splits._PATTERNS) & set(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS))


def tokenizer() -> PreTrainedTokenizerFast:
    """No chain of merges leads to its word `abc`."""
    words = {"<s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "abc": 5}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, [("a", "b")])), bos_token="<s>")


def read_as(name: str | None, architecture: str = "llama", **metadata: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of a file that names its way of cutting `name`."""
    metadata = {"tokenizer.ggml.model": "gpt2", "general.architecture": architecture} | metadata
    named = metadata if name is None else metadata | {"tokenizer.ggml.pre": name}
    read = tokenizer()
    splits.split_as_named(read, GgufHeader(Path("model.gguf"), named, {}))
    return read


def pieces(text: str, read: PreTrainedTokenizerFast) -> list[str]:
    cut = read.backend_tokenizer.pre_tokenizer
    assert cut is not None
    return [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", KNOWN_TO_BOTH)
@given(text=st.text(st.sampled_from(sorted(set(TEXT))), max_size=40))
def test_text_is_cut_as_transformers_cuts_it(name: str, text: str) -> None:
    theirs = gguf_tokenizer_mapping.set_split_regex(tokenizer(), {"pre_tokenizer_type": name})
    assert pieces(text, read_as(name)) == pieces(text, theirs)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "a 123  45", ["a", " 123", " ", " 45"]),
        ("smollm", "a 123  45", ["a", " ", "1", "2", "3", "  ", "4", "5"]),
        ("refact", "a 123  45", ["a", " ", "1", "2", "3", "  ", "4", "5"]),
        ("seed-coder", "a);\n\n b 12", ["a", ");", "\n\n", " b", " ", "1", "2"]),
        ("deepseek-coder", "if a:\n  b = 中文 12", ["if", " a", ":", "\n", " ", " b", " =", " ", "中文", " ", *"12"]),
        # By hand after the six rules in turn, each on all that the others left: line ends, words, signs (which take in
        # Latin letters, so that they cut words at others), space at an end, eastern script (and € and “), digits.
        (
            "deepseek-llm",
            "Don't pay 1234€,  naïve\r\n\n",
            ["Don", "'", "t", " pay", " ", *"1234", "€", ",", " ", " na", "ï", "ve", "\r", "\n", "\n"],
        ),
        (
            "deepseek-llm",
            "中文 English，한국어。 かな  ไทย ½x",
            ["中文", " English", "，", "한국어", "。", " ", "かな", "  ", "ไทย", " ", "½", "x"],
        ),
        ("deepseek-llm", "a  \n b   ", ["a", "  ", "\n", " b", "   "]),
        # Letters that normal forms would make others of, and what is a letter but has one case alone.
        (
            "deepseek-llm",
            "\u212a\u2126\u1f7d\u1fbe\u01bb\U00010400",
            ["\u212a\u2126\u1f7d\u1fbe", "\u01bb", "\U00010400"],
        ),
        ("deepseek-llm", " (a[0]{b};~) “c”", [" (", "a", "[", "0", "]{", "b", "};~)", " ", "“", "c", "”"]),
    ],
)
def test_digits_and_lines_are_cut_as_the_vocabulary_was_learned(name: str, text: str, expected: list[str]) -> None:
    assert pieces(text, read_as(name)) == expected


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2moe", "qwen3", "qwen3moe"])
@pytest.mark.parametrize("name", [None, "default"])
def test_an_old_file_of_qwen_is_cut_as_all_of_qwen(architecture: str, name: str | None) -> None:
    assert pieces(TEXT, read_as(name, architecture)) == pieces(TEXT, read_as("qwen2", architecture))


@pytest.mark.parametrize(
    ("name", "says"), [("brand-new", "'brand-new'.*not known here"), (None, "does not name"), ("default", "not name")]
)
def test_a_way_that_is_not_known_is_refused(name: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_as(name)
    assert "\n" not in str(error.value)


def test_words_that_no_merges_lead_to_are_found_where_the_vocabulary_has_them() -> None:
    assert read_as("llama-bpe")("abc", add_special_tokens=False).input_ids == [5]
    assert read_as("gpt-2")("abc", add_special_tokens=False).input_ids == [4, 3]


def test_text_of_llama_3_begins_with_the_token_for_it_unless_the_file_says_otherwise() -> None:
    assert read_as("llama-bpe")("a").input_ids == [0, 1]
    assert read_as("gpt-2")("a").input_ids == [1]
    assert read_as("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})("a").input_ids == [1]


def test_another_kind_of_vocabulary_is_left_as_it_is() -> None:
    assert read_as(None, **{"tokenizer.ggml.model": "llama"}).backend_tokenizer.pre_tokenizer is None
