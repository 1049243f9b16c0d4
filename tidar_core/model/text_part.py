"""What a config.json states of the model of text: all of it, the text part of a larger one (images, sound), or one of
a type that nobody else knows, whose shape is a known one's.

Of a larger model the text part alone is served. Where it has three coordinates for a position (Qwen's vision models),
these are equal in text, and so is the rotation.
"""

from pathlib import Path
from typing import Any, get_args

from transformers import AutoConfig

from tidar_core.config import Architecture, ConfigError
from tidar_core.model.contract import read_own_drafter
from tidar_core.model.sources import read_json

KNOWN: tuple[Architecture, ...] = get_args(Architecture)
_TEXT_PARTS: dict[str, Architecture] = {
    **{each: each for each in KNOWN},
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}


def read_text_part(directory: Path, taken_for: Architecture | None = None) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of the model of text in `directory`, and its configuration as transformers writes it.

    A type that is not known is `taken_for` another, or for what a `tidar.json` beside the weights states. Raises
    ConfigError for what is no known one.
    """
    stated = read_json(directory / "config.json")
    named = stated.get("model_type")
    if named in KNOWN:
        return named, stated
    if taken_for is None and (contract := read_own_drafter(directory)) is not None:
        taken_for = contract.architecture
    if taken_for is not None:
        return taken_for, stated | {"model_type": taken_for}
    part = _part_of(directory, named)
    architecture = _TEXT_PARTS.get(part.get("model_type", ""))
    if architecture is None:
        raise _unknown(directory, named)
    return architecture, part | {"model_type": architecture}


def _unknown(directory: Path, named: Any) -> ConfigError:
    return ConfigError(
        f"{directory.name}: architecture {named!r} is not supported, only {', '.join(KNOWN)}; where it is one of these "
        'under another name, state "architecture" in its tidar.json'
    )


def _part_of(directory: Path, named: Any) -> dict[str, Any]:
    """The configuration of the text part of a model that has others; nothing where it is no such model."""
    try:
        whole = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        text = whole.get_text_config(decoder=True)
    except Exception as error:  # whatever a broken file, or a type it does not know, makes the library raise
        raise _unknown(directory, named) from error
    if text is whole:
        return {}
    part = text.to_dict()
    stating = [text, whole]
    if text.model_type == "qwen3_vl_moe_text":  # which states neither for itself
        stating, part["norm_topk_prob"] = [whole], True
    part["tie_word_embeddings"] = any(getattr(each, "tie_word_embeddings", False) for each in stating)
    if (ends := read_json(directory / "config.json").get("eos_token_id")) is not None:
        part["eos_token_id"] = ends
    rope = part.get("rope_parameters") or {}
    part["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return part
