"""The drafter adapter: its format on disk, the checks that it fits a model, the adapters that are shipped.

An adapter is a directory of two files. `adapter.json` is an `AdapterConfig`: which base it was made for and what its
drafter does. `adapter.safetensors` holds `mask_embedding` ([block_length, hidden], the inputs of the mask rows by
slot) and for every layer i and adapted projection `layers.{i}.{projection}.A` ([rank, in]) and `.B` ([out, rank]):
on mask rows alone y = x Wᵀ + (x Aᵀ) Bᵀ, without another scale. Projections are fused as in `weights.py`. Where the
drafter has a slot head, its four matrices are `slot_head.hidden`, `.token`, `.state` and `.out`.

The format names more drafters than the engine runs today, so that other published lossless drafters can be described
in it; what the engine cannot run is refused by name.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tidar_core.config import Architecture, ConfigError, ModelConfig
from tidar_core.model.loading import fingerprint
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LowRank, ModelWeights, SlotHead, named_tensors

CONFIG_FILE = "adapter.json"
WEIGHTS_FILE = "adapter.safetensors"

Projection = Literal["qkv", "o", "gate_up", "down"]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class BaseIdentity(BaseModel):
    """The model that an adapter is for: name, hashes of weights and vocabulary, and the shape an adapter must fit."""

    model_config = _STRICT

    name: str
    fingerprint: str
    tokenizer: str
    architecture: Architecture
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    def projection_shape(self, projection: Projection) -> tuple[int, int]:
        """(in, out) of a fused projection."""
        attention = self.heads * self.head_dim
        shapes: dict[Projection, tuple[int, int]] = {
            "qkv": (self.hidden_size, attention + 2 * self.kv_heads * self.head_dim),
            "o": (attention, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }
        return shapes[projection]


class AdapterConfig(BaseModel):
    """`adapter.json`. Unknown keys are refused.

    layers: those that are adapted, from 0 on, None for all.
    slot_head: width of the head that corrects a slot by the token before it (`weights.SlotHead`), 0 without one.
    block_length: slots a proposal was trained with. within_block: whether slots of a proposal see each other both
    ways or only the earlier ones. slot_0: what stands in slot 0, a mask or the anchor. slot_tokens: what stands in
    the others. labels: "aligned" where slot s guesses its own position, "shifted" where it guesses the next.
    holds: how often the draft of slot 1, 2, … holds where those before it do, as measured: what the draft policy
    expects until it has seen some. training: how the drafter came about, free of form.
    """

    model_config = _STRICT

    format: Literal[1] = 1
    kind: Literal["low-rank", "projections"] = "low-rank"
    base: BaseIdentity
    rank: int = Field(ge=1)
    projections: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")
    layers: tuple[int, ...] | None = None
    slot_head: int = Field(default=0, ge=0)
    block_length: int = Field(ge=2)
    within_block: Literal["bidirectional", "causal"]
    slot_0: Literal["mask", "anchor"] = "mask"
    slot_tokens: Literal["mask", "random"] = "mask"
    labels: Literal["aligned", "shifted"] = "aligned"
    holds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    training: dict[str, Any] = {}

    @model_validator(mode="after")
    def _layers_are_the_bases(self) -> "AdapterConfig":
        if self.layers is not None and not set(self.layers) <= set(range(self.base.layers)):
            raise ValueError(f"layers {list(self.layers)} are not all from 0 to {self.base.layers - 1}")
        return self

    def adapts(self, layer: int, projection: Projection) -> bool:
        return projection in self.projections and (self.layers is None or layer in self.layers)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A drafter: what it is, its tensors, and the name of its directory. mask_token: the token of the vocabulary that
    its slots hold, where it is one."""

    config: AdapterConfig
    weights: AdapterWeights
    name: str
    mask_token: int | None = None


def identify_base(
    name: str, config: ModelConfig, weights: ModelWeights, tokenizer: PreTrainedTokenizerBase
) -> BaseIdentity:
    """What an adapter has to fit: the loaded model called `name`."""
    return BaseIdentity(
        name=name,
        fingerprint=fingerprint(weights),
        tokenizer=tokenizer_fingerprint(tokenizer),
        architecture=config.architecture,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of which token has which id: 16 hex digits.

    The `[PAD1234]` tokens with which GGUF files fill a vocabulary up to the embedding's rows are left out.
    """
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token != f"[PAD{number}]")
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def load_adapter(
    directory: Path,
    base: BaseIdentity,
    dtype: torch.dtype,
    device: torch.device | str,
    report: Callable[[str], None] | None = None,
) -> Adapter:
    """Read the adapter in `directory` for the model `base`, as `dtype` onto `device`.

    Raises ConfigError where a file is missing or broken, where shapes or tokenizer do not fit, and for a drafter
    that the engine does not run. Other weights of a fitting base are one line to `report`: the drafts may hold less
    often, the text cannot change.
    """
    config = read_adapter_config(directory)
    _check_supported(directory, config)
    _check_fit(directory, config.base, base)
    if config.base.fingerprint != base.fingerprint and report is not None:
        report(
            f"adapter {directory.name} was made for other weights ({config.base.name}) than {base.name}: "
            "its drafts may hold less often, the text stays the model's own"
        )
    path = directory / WEIGHTS_FILE
    expected = dict(_expected_tensors(config))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _check_tensors(path, expected, {name: tuple(file.get_slice(name).get_shape()) for name in names})
            # Copied out of the file's mapping, so that memory is aligned as for any other weight.
            tensors = {
                name: torch.empty(shape, dtype=dtype, device=device).copy_(file.get_tensor(name))
                for name, shape in expected.items()
            }
    except FileNotFoundError:
        raise ConfigError(f"the adapter {directory} has no {WEIGHTS_FILE}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error})") from None
    return Adapter(config, _assemble(config, tensors), directory.name)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """`adapter.json` of the adapter in `directory`, validated. Raises ConfigError in one line."""
    path = directory / CONFIG_FILE
    try:
        return AdapterConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no adapter at {directory}: there is no {CONFIG_FILE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not valid ({where + ': ' if where else ''}{first['msg']})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None


def save_adapter(adapter: Adapter, directory: Path) -> None:
    """Write `adapter` into `directory` (created), over one that is there; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    weights, config = directory / WEIGHTS_FILE, directory / CONFIG_FILE
    weights_part, config_part = weights.with_suffix(".part"), config.with_suffix(".json.part")
    held = dict(named_tensors(adapter.weights))
    tensors = {name: held[name].detach().cpu().contiguous() for name, _ in _expected_tensors(adapter.config)}
    weights_part.write_bytes(save(tensors, metadata={"format": "pt"}))
    config_part.write_text(adapter.config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(weights_part, weights)
    os.replace(config_part, config)


def default_adapter_for(base: BaseIdentity) -> Path | None:
    """The shipped adapter made for the model `base`, by its weights or, failing that, by its name; None if none is."""
    shipped = [(path, read_adapter_config(path).base) for path in shipped_adapters()]
    for path, known in shipped:
        if known.fingerprint == base.fingerprint:
            return path
    name = base.name.rpartition("/")[2].lower()
    for path, known in shipped:
        if known.name.lower() == name and not _misfits(known, base):
            return path
    return None


def shipped_adapters() -> list[Path]:
    """Directories of the adapters that come with the package."""
    root = Path(str(files("tidar_core").joinpath("data", "adapters")))
    return sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}"))


def _check_supported(directory: Path, config: AdapterConfig) -> None:
    runs = {"kind": "low-rank", "slot_0": "mask", "slot_tokens": "mask", "labels": "aligned"}
    for key, value in runs.items():
        if getattr(config, key) != value:
            stated = getattr(config, key)
            raise ConfigError(f"adapter {directory.name}: {key} {stated!r} is not supported yet, only {value!r} is")


def _misfits(made_for: BaseIdentity, base: BaseIdentity) -> list[str]:
    """Names of the fields in which an adapter's base differs from the model in a way that makes it unusable."""
    fields = [field for field in BaseIdentity.model_fields if field not in ("name", "fingerprint")]
    return [field for field in fields if getattr(made_for, field) != getattr(base, field)]


def _check_fit(directory: Path, made_for: BaseIdentity, base: BaseIdentity) -> None:
    misfits = _misfits(made_for, base)
    if misfits == ["tokenizer"]:
        raise ConfigError(f"adapter {directory.name} was made for another tokenizer than that of {base.name}")
    for field in misfits:
        if field != "tokenizer":
            theirs, ours = getattr(made_for, field), getattr(base, field)
            message = f"made for {made_for.name} with {field} {theirs}, {base.name} has {ours}"
            raise ConfigError(f"adapter {directory.name} does not fit: {message}")


def _expected_tensors(config: AdapterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mask_embedding", (config.block_length, config.base.hidden_size)
    for layer in range(config.base.layers):
        for projection in config.projections:
            if not config.adapts(layer, projection):
                continue
            columns, rows = config.base.projection_shape(projection)
            yield f"layers.{layer}.{projection}.A", (config.rank, columns)
            yield f"layers.{layer}.{projection}.B", (rows, config.rank)
    if config.slot_head:
        width, hidden = config.slot_head, config.base.hidden_size
        yield "slot_head.hidden", (width, hidden)
        yield "slot_head.token", (width, hidden)
        yield "slot_head.state", (width, width)
        yield "slot_head.out", (hidden, width)


def _check_tensors(path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{path} lacks the tensor {name}")
        if found[name] != shape:
            raise ConfigError(f"{path}: tensor {name} is {list(found[name])}, but {list(shape)} was expected")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ConfigError(f"{path} holds the tensor {unknown[0]}, which {CONFIG_FILE} does not speak of")


def _assemble(config: AdapterConfig, tensors: dict[str, Tensor]) -> AdapterWeights:
    def low_rank(layer: int, projection: Projection) -> LowRank | None:
        if not config.adapts(layer, projection):
            return None
        return LowRank(tensors[f"layers.{layer}.{projection}.A"], tensors[f"layers.{layer}.{projection}.B"])

    layers = tuple(
        LayerAdapter(
            qkv=low_rank(layer, "qkv"),
            o=low_rank(layer, "o"),
            gate_up=low_rank(layer, "gate_up"),
            down=low_rank(layer, "down"),
        )
        for layer in range(config.base.layers)
    )
    parts = {
        name.removeprefix("slot_head."): tensor for name, tensor in tensors.items() if name.startswith("slot_head.")
    }
    return AdapterWeights(tensors["mask_embedding"], layers, SlotHead(**parts) if parts else None)
