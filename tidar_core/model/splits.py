"""How a byte-level vocabulary cuts text into words before it merges bytes, where files do not say it, or say it wrong.

A GGUF file only names the way (`tokenizer.ggml.pre`). The names are llama.cpp's; of those, what the architectures come
with that are read is known here. A name that is not is refused: text cut otherwise than in training still reads well,
so nobody would notice the wrong tokens.
"""

import json

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
_EASTERN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")
# Letters of two cases, as far as DeepSeek's list goes. In numbers: some look like others, for which editors swap them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EASTERN,
    r"\p{N}",
)
_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "solar-open"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "seed-coder": _SEED_CODER,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
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


def split_as_mistral(tokenizer: PreTrainedTokenizerFast) -> None:
    """Put right the tokenizer.json of Mistral Small 3.1 and its kin, which have the words of Tekken and the cuts of
    Llama 3 (https://github.com/huggingface/transformers/pull/42299); any other is left as it is."""
    backend = tokenizer.backend_tokenizer
    cuts = backend.pre_tokenizer
    if not isinstance(cuts, pre_tokenizers.Sequence) or "[INST]" not in tokenizer.get_vocab():
        return
    first = json.loads(cuts[0].__getstate__())
    if first.get("pattern") == {"Regex": _LLAMA3[0]}:
        cuts[0] = pre_tokenizers.Split(Regex(_TEKKEN[0]), behavior="isolated")


def _named(header: GgufHeader) -> str:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name != "default":
        return str(name)
    if header.metadata.get("general.architecture") in ("qwen2", "qwen2moe", "qwen3", "qwen3moe"):
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
