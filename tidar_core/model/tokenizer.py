"""A model's tokenizer and chat template, read from its source, and put right where files are known to be wrong; what
they make of one prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from tidar_core.config import ConfigError, ModelConfig
from tidar_core.error_text import one_line
from tidar_core.model.gguf import read_header
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.model.splits import split_as_mistral, split_as_named

_MISTRALS = ("mistral", "mistral3", "ministral", "ministral3", "pixtral", "voxtral")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_PROBE = "Qz7TurnContentZq7"
# Put before a template that takes no strings: what it is given as one, it gets as its only part.
_AS_PARTS = (
    "{%- set given = namespace(turns=[]) -%}{%- for turn in messages -%}"
    "{%- set text = turn.content -%}{%- if text is none or text is undefined or text is string -%}"
    "{%- set turn = dict(turn, content=[{'type': 'text', 'text': text or ''}]) -%}{%- endif -%}"
    "{%- set given.turns = given.turns + [turn] -%}{%- endfor -%}{%- set messages = given.turns -%}"
)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """The model's tokenizer, with its chat template where it has one, which takes what turns say as strings. Raises
    ConfigError."""
    try:
        tokenizer = _of_directory(source.directory) if source.gguf_path is None else _of_gguf(source.gguf_path)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{source.name}: its tokenizer cannot be read ({one_line(error)})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{source.name}: it has no tokenizer.json, and no fast tokenizer can be made of its files")
    if source.gguf_path is not None:
        split_as_named(tokenizer, read_header(source.gguf_path))
    if _wants_parts(tokenizer):
        tokenizer.chat_template = f"{_AS_PARTS}{tokenizer.chat_template}"
    return tokenizer


def with_all_ends(model: ModelConfig, source: ModelSource, tokenizer: PreTrainedTokenizerFast) -> ModelConfig:
    """The model with every token that ends an answer: those that its files name, and the tokenizer's own as in vLLM,
    for who teaches a model to chat often changes that alone. A GGUF file has one or two by name: others that end a turn
    are known by their text, as in llama.cpp."""
    named = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if source.gguf_file is not None:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        named += [token for token, entry in added.items() if entry.special and entry.content in _TURN_ENDS]
    known = [token for token in named if token < model.vocab_size]
    return replace(model, eos_ids=tuple(dict.fromkeys((*model.eos_ids, *known))))


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of one user turn in the model's chat template, or of the text alone where it has none."""
    if tokenizer.chat_template is None:
        return plain_prompt(tokenizer, text)
    turns = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def chat_text(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """One user turn in the model's chat template, or the text alone where it has none, for engines that tokenize by
    themselves."""
    if tokenizer.chat_template is None:
        return text
    turns = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def plain_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of the text as a completion prompt."""
    return tuple(tokenizer(text)["input_ids"])


def _of_gguf(path: Path) -> PreTrainedTokenizerFast:
    """What the file says. From its folder transformers would take a tokenizer.json before that, and look into a
    config.json for what is known to be wrong with Mistral's: so the file is named from the root on."""
    path = path.absolute()
    return PreTrainedTokenizerFast(
        name_or_path=path.anchor, gguf_file=str(path.relative_to(path.anchor)), local_files_only=True
    )


def _of_directory(directory: Path) -> Any:
    """A tokenizer.json is taken as it is: transformers' classes of models put their own cuts, prefixes and decoders in
    place of the file's, by whatever class the folder names (https://github.com/huggingface/transformers/issues/45812),
    and the wrong tokens still read well."""
    path = directory / "config.json"
    stated = read_json(path) if path.is_file() else {}
    kind = stated.get("model_type")
    # Of the regex nobody can follow the warning; what is wrong is put right below.
    given: dict[str, Any] = {"fix_mistral_regex": False} if kind in _MISTRALS else {}
    if (directory / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, **given)
    else:
        tokenizer = _made_of_a_vocabulary(directory, stated, given)
    if kind in _MISTRALS and isinstance(tokenizer, PreTrainedTokenizerFast):
        split_as_mistral(tokenizer)
    beside = directory / "chat_template.json"  # where a processor's template was, and of some models is
    if tokenizer.chat_template is None and beside.is_file():
        tokenizer.chat_template = read_json(beside).get("chat_template")
    return tokenizer


def _made_of_a_vocabulary(directory: Path, stated: dict[str, Any], given: dict[str, Any]) -> Any:
    """Left to itself, AutoTokenizer reads the model's configuration by its own class: see `_llama_config` in
    configuration.py. How positions rotate is nothing to it, and only that class could read it; a type that is not known
    has none."""
    kind = stated.get("model_type")
    if kind == "llama" or kind not in CONFIG_MAPPING:
        named = {key: value for key, value in stated.items() if not key.startswith("rope_")}
        given = {**given, "config": PreTrainedConfig.from_dict(named)}
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True, **given)


def _wants_parts(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a template says nothing of a turn that is a string, as those of many models that also see: they would
    answer a question that they were never told."""

    def says(content: Any) -> bool:
        try:
            turns = [{"role": "user", "content": content}]
            return _PROBE in str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # a template may refuse in any way it likes
            return False

    if not isinstance(tokenizer.chat_template, str):
        return False
    return not says(_PROBE) and says([{"type": "text", "text": _PROBE}])
