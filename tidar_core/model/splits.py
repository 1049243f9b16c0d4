"""How a GGUF file's byte-level vocabulary cuts text into words before it merges bytes.

The file only names the way (`tokenizer.ggml.pre`). The names are llama.cpp's; of those, what Llama, Qwen2 and Qwen3
architectures come with is known here. A name that is not is refused: text cut otherwise than in training still reads
well, so nobody would notice the wrong tokens.
"""

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError
from tidar_core.model.gguf import GgufHeader

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE_A_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, signs: str = rf"{_SIGNS}[\r\n]*") -> tuple[str, ...]:
    return (rf"{_CONTRACTION}|{_BEFORE_A_WORD}\p{{L}}+|{digits}|{signs}|{_SPACES}",)


def _cased_words(digits: str, ending: str = "") -> tuple[str, ...]:
    lower, upper = rf"{_BEFORE_A_WORD}{_UPPER}*{_LOWER}+{ending}", rf"{_BEFORE_A_WORD}{_UPPER}+{_LOWER}*{ending}"
    return (rf"{lower}|{upper}|{digits}|{_SIGNS}[\r\n/]*|{_SPACES}",)


_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_TEKKEN, _GPT4O = _cased_words(r"\p{N}"), _cased_words(r"\p{N}{1,3}", rf"{_CONTRACTION}?")
_SEED_CODER = _words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "solar-open"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "seed-coder": _SEED_CODER,
    "deepseek-coder": _DEEPSEEK_CODER,
}
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "trillion", "a.x-4.0", "mellum", "gigachat")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
# Their vocabularies have whole words that no chain of merges leads to.
_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken")


def split_as_named(tokenizer: PreTrainedTokenizerFast, header: GgufHeader) -> None:
    """Make `tokenizer`, read of the GGUF file behind `header`, cut text as the file's vocabulary was learned.

    Files of Llama 3 and of Mistral's Tekken that do not say whether text begins with a token of its own get one, as in
    llama.cpp. A vocabulary of another kind (SentencePiece) is left as it is. Raises ConfigError.
    """
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    name = _named(header)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = _pre_tokenizer(name, header.path.name)
    if name in _WORDS_FIRST:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in header.metadata:
            tokenizer.add_bos_token = True  # type: ignore[misc]  # it has a setter


def _named(header: GgufHeader) -> str:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name != "default":
        return str(name)
    if header.metadata.get("general.architecture") in ("qwen2", "qwen3"):
        return "qwen2"  # all that these had when converters did not name it yet
    raise ConfigError(
        f"{header.path.name} does not name how its vocabulary cuts text (tokenizer.ggml.pre), as old converters left "
        "it: take a newer file, or the safetensors checkpoint"
    )


def _pre_tokenizer(name: str, file_name: str) -> pre_tokenizers.PreTokenizer:
    if name in _AS_GPT2 or name in _DIGITS_APART:
        as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if name in _AS_GPT2:
            return as_gpt2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    if name not in _PATTERNS:
        raise ConfigError(
            f"{file_name} cuts text in the way {name!r} (tokenizer.ggml.pre), which is not known here: take the "
            "safetensors checkpoint"
        )
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
