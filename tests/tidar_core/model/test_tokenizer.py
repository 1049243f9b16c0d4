"""Tokenizers and chat templates whose files are known wrong, or say what a string is in a way of their own."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import edit_json, tiny_checkpoint, tiny_gguf
from tidar_core.convert.template import open_user_turn
from tidar_core.model import splits
from tidar_core.model.configuration import load_config
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer, with_all_ends

ASKED = "What is the capital of France?"
# Each in the manner of a family of models that also see: they say the parts of a turn that are text.
CHOSEN = (
    "{% for turn in messages %}{{ turn.role }}: "
    "{% for part in turn['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }} {% endfor %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LOOKED_AT = (
    "{% for turn in messages %}{{ turn.role }}{% if turn['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in turn['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<end>\n"
    "{% endfor %}"
)
EITHER = (
    "{% for turn in messages %}{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{{ turn.content[0].text }}{% endif %}{% endfor %}"
)


def with_template(directory: Path, template: str, name: str = "chat_template.jinja") -> PreTrainedTokenizerFast:
    model = tiny_checkpoint(directory, "llama")
    edit_json(model / "tokenizer_config.json", chat_template=None)
    text = json.dumps({"chat_template": template}) if name.endswith(".json") else template
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / name).write_text(text)
    return load_tokenizer(find_model(str(model)))


def said(tokenizer: PreTrainedTokenizerFast, content: Any) -> str:
    return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
@pytest.mark.parametrize("template", [CHOSEN, LOOKED_AT], ids=["chosen", "looked at"])
def test_a_template_of_parts_says_what_a_turn_says_as_a_string(tmp_path: Path, template: str, name: str) -> None:
    tokenizer = with_template(tmp_path, template, name)
    text = said(tokenizer, ASKED)
    assert ASKED in text
    assert said(tokenizer, [{"type": "text", "text": ASKED}]) == text
    turn = open_user_turn(tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
    assert turn is not None
    assert "Hello" in tokenizer.decode(list(turn.tokens))


def test_a_template_that_takes_strings_is_left_as_it_is(tmp_path: Path) -> None:
    assert with_template(tmp_path, EITHER).chat_template == EITHER


def mistral(directory: Path, pattern: str, *words: str) -> PreTrainedTokenizerFast:
    """A Mistral checkpoint whose tokenizer.json cuts text by a pattern, with further words."""
    model = tiny_checkpoint(directory, "mistral")
    stated = json.loads((model / "tokenizer.json").read_text())
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    rest = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    stated["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, rest]}
    stated["model"]["vocab"] |= {word: len(stated["model"]["vocab"]) + place for place, word in enumerate(words)}
    (model / "tokenizer.json").write_text(json.dumps(stated))
    return load_tokenizer(find_model(str(model)))


def pieces(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    cuts = tokenizer.backend_tokenizer.pre_tokenizer
    assert cuts is not None
    return [piece for piece, _ in cuts.pre_tokenize_str("helloWorld 12345")]


def test_tekken_with_the_cuts_of_llama_3_is_put_right(tmp_path: Path) -> None:
    """As Mistral Small 3.1 was published; digits stand alone in Tekken, and words end where case changes."""
    tekken = ["hello", "World", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces(mistral(tmp_path / "published", splits._LLAMA3[0], "[INST]")) == tekken
    assert pieces(mistral(tmp_path / "right", splits._TEKKEN[0], "[INST]")) == tekken


def test_a_mistral_with_llama_3s_own_words_is_left_as_it_is(tmp_path: Path) -> None:
    assert pieces(mistral(tmp_path, splits._LLAMA3[0])) == ["helloWorld", "Ġ", "123", "45"]


SPACED = "Hello 2024 and  2 more:\n    return 12345 # é 你"


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "TokenizersBackend", None])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_tokenizer_json_is_read_as_it_is_whatever_class_is_named(
    tmp_path: Path, family: Literal["llama", "qwen2", "qwen3"], named: str | None
) -> None:
    """SmolLM2 names GPT-2's class and takes digits one by one; many of Qwen2's architecture have Llama's vocabulary.
    Transformers' own classes have cuts of their own."""
    model = tiny_checkpoint(tmp_path, family)
    stated = json.loads((model / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": True}
    rest = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    stated["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, rest]}
    (model / "tokenizer.json").write_text(json.dumps(stated))
    edit_json(model / "tokenizer_config.json", tokenizer_class=named)
    tokenizer, meant = load_tokenizer(find_model(str(model))), Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer(SPACED).input_ids == meant.encode(SPACED).ids
    assert tokenizer.decode(tokenizer(SPACED).input_ids) == SPACED


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_vocabulary_of_pieces_keeps_its_spaces(tmp_path: Path, family: Literal["llama", "qwen2"]) -> None:
    """As Yi's: nothing is put in front of a text. Of Qwen2's architecture it was cut as if it were of bytes."""
    model = tiny_checkpoint(tmp_path, family)
    letters = {letter: place + 3 for place, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    pieces = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2} | letters, [], unk_token="<unk>"))
    pieces.normalizer = normalizers.Replace(" ", "▁")
    pieces.decoder = decoders.Replace("▁", " ")
    pieces.save(str(model / "tokenizer.json"))
    edit_json(model / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>", pad_token=None)
    tokenizer = load_tokenizer(find_model(str(model)))
    assert tokenizer("so it goes").tokens() == list("so▁it▁goes")
    assert tokenizer.decode(tokenizer("so it goes").input_ids) == "so it goes"


def ends(model: Path) -> tuple[int, ...]:
    source = find_model(str(model))
    return with_all_ends(load_config(source), source, load_tokenizer(source)).eos_ids


def test_every_end_that_the_files_name_ends_an_answer(tmp_path: Path) -> None:
    """A base model that was taught to chat often names the end of a turn in its tokenizer alone: answers ran on."""
    model = tiny_checkpoint(tmp_path, "qwen2")
    edit_json(model / "generation_config.json", eos_token_id=0)
    assert ends(model) == (0, 2)
    edit_json(model / "tokenizer_config.json", eos_token="<|im_start|>")
    assert ends(model) == (0, 1)
    edit_json(model / "tokenizer_config.json", eos_token=None)
    assert ends(model) == (0,)


@pytest.mark.parametrize(("word", "expected"), [("<|eom_id|>", (2, 1)), ("<|python_tag|>", (2,))])
def test_a_gguf_files_ends_of_turns_are_known_by_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: tuple[int, ...]
) -> None:
    """Llama 3.1 may end a call of a tool by `<|eom_id|>`, which its files have no key for."""
    model = tiny_checkpoint(tmp_path / "model", "llama")
    stated = json.loads((model / "tokenizer.json").read_text())
    vocabulary = stated["model"]["vocab"]
    (taken,) = (token for token, place in vocabulary.items() if place == 1)
    stated["model"]["vocab"] = {word if token == taken else token: place for token, place in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(stated))
    monkeypatch.setattr("tests.tiny.TURN_START", word)
    assert ends(tiny_gguf(tmp_path / "model.gguf", model, padding=2)) == expected
