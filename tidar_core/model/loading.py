"""A model's weights, read from its source.

Only safetensors and GGUF are read, tensor by tensor, straight into the fused tensors of the decoder. Pickled weights
and code that comes with a checkpoint are never touched.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidar_core.config import ConfigError, Experts, ModelConfig, Norms
from tidar_core.error_text import one_line
from tidar_core.model.gguf import GgufCheckpoint, read_header
from tidar_core.model.mixtures import expert_names, expert_tensors, router_rows
from tidar_core.model.quantization import read_quantization
from tidar_core.model.quantized import QuantizedMatrix, StoredLinear
from tidar_core.model.quantized_layouts import PACKED, quantized_matrix
from tidar_core.model.rope import paired_as_stored
from tidar_core.model.sources import ModelSource, read_json, refuse_lora
from tidar_core.model.stacked import InStack, in_stack
from tidar_core.model.weights import LayerWeights, ModelWeights, layer_tensors
from tidar_core.transfer import enough_memory

_BARE = "model."
_NORMS: dict[Norms, dict[str, str]] = {  # what the decoder calls them, and what transformers does
    "before": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "behind": {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm",
        "attention_norm": "post_self_attn_layernorm",
        "post_norm": "post_attention_layernorm",
        "mlp_norm": "post_mlp_layernorm",
    },
}
_GEMMA_NORMS = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
_LAYERS = "model.layers."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MOST_THREADS = 8  # that dequantize: more of them wait for memory, and for the one that copies
_FUSED_ATTENTION, _FUSED_MLP = ("phi3",), ("phi3", "glm", "glm4")  # in their files already


class Checkpoint(Protocol):
    """Named tensors on disk, under transformers' names."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the tensor `name`, None where there is none."""

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copies the tensor `name` into `out`: its shape, any float dtype and device. Raises ConfigError."""


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
    *,
    told: Callable[[str, Tensor], None] = lambda name, tensor: None,
    packed: Callable[[LayerWeights], LayerWeights] = lambda layer: layer,
) -> ModelWeights:
    """Read all weights as `dtype` onto `device`, fused for the decoder.

    One tensor of the file is in memory beside the result at a time. `progress(done, total)` counts weights. `told` sees
    each tensor as it was read, in the order of fingerprints; then `packed` makes of a layer what is kept of it, before
    the next one is read: the model is never in memory as a whole where what is packed takes less.
    Raises ConfigError, naming the tensor, where one is missing, misshapen or stored in a way that is not read.
    """
    with open_checkpoint(source, config) as checkpoint:
        wanted = _tensors_to_read(checkpoint, config, source.name)
        total, done = sum(map(prod, wanted.values())), 0

        def read(*names: str, kept: torch.dtype = dtype) -> Tensor:
            """`read_fused`, counted."""
            nonlocal done
            fused = read_fused(checkpoint, {name: wanted[name] for name in names}, kept, device)
            done += fused.numel()
            if progress is not None:
                progress(done, total)
            return fused

        def packed_layer(index: int) -> LayerWeights:
            layer = _read_layer(index, config, read)
            for name, tensor in layer_tensors(index, layer):
                told(name, tensor)
            return packed(layer)

        rows = read(_EMBEDDING)
        embedding = _times(rows, config.embedding_scale)
        told("embedding", embedding)
        layers = tuple(packed_layer(index) for index in range(config.layers))
        final_norm = _times(_norm(read("model.norm.weight"), config), config.logit_scale)
        told("final_norm", final_norm)
        head = read(_HEAD) if _HEAD in wanted else rows
        if config.tied_head and torch.equal(head, rows):
            head = rows
        if head is not embedding:
            told("head", head)
        return ModelWeights(embedding, layers, final_norm, head)


def _times(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor * scale


def load_tensors(source: ModelSource, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights as ordinary tensors of `dtype` under transformers' names. Raises ConfigError as `load_weights`."""
    with open_checkpoint(source, config) as checkpoint:
        wanted = _tensors_to_read(checkpoint, config, source.name)
        return {name: read_fused(checkpoint, {name: shape}, dtype, "cpu") for name, shape in wanted.items()}


@contextmanager
def open_checkpoint(source: ModelSource, config: ModelConfig) -> Iterator[Checkpoint]:
    """The tensors of a model on disk, while the context lasts. Raises ConfigError where they cannot be read."""
    with ExitStack() as stack:
        if source.gguf_path is not None:
            workers = min(_MOST_THREADS, torch.get_num_threads())
            pool = stack.enter_context(ThreadPoolExecutor(workers, "gguf"))
            yield GgufCheckpoint(read_header(source.gguf_path), config, pool, workers)
        else:
            yield _SafetensorsCheckpoint(source.directory, stack, config.tied_head)


def checked(
    checkpoint: Checkpoint, wanted: Iterable[tuple[str, tuple[int, ...]]], model: str
) -> dict[str, tuple[int, ...]]:
    """The wanted names and shapes, each checked before the next one is generated: a broken header may name billions.

    Raises ConfigError, naming the tensor, where one is missing or misshapen.
    """
    shapes = {}
    for name, shape in wanted:
        found = checkpoint.shape(name)
        if found is None:
            raise ConfigError(f"{model} lacks the tensor {name}: the checkpoint is incomplete")
        if found != shape:
            raise ConfigError(f"{model}: tensor {name} is {list(found)}, but {list(shape)} was expected")
        shapes[name] = shape
    return shapes


def read_fused(
    checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """The tensors of these names and shapes as one, concatenated along the rows."""
    rows = [shape[0] for shape in wanted.values()]
    columns = next(iter(wanted.values()))[1:]
    fused = torch.empty((sum(rows), *columns), dtype=dtype, device=device)
    for name, part in zip(wanted, fused.split(rows), strict=True):
        checkpoint.copy_into(name, part)
    return fused


class _SafetensorsCheckpoint:
    """Tensors of one safetensors file or of several shards, closed with `stack`. Of a `tied` head and embedding the
    file may have either; that of a bare model, without its head, names all others without their first word, and a
    model of more than text has them behind words of its own.
    A quantized matrix has the name and the shape that it would have as an ordinary tensor."""

    def __init__(self, directory: Path, stack: ExitStack, tied: bool):
        self.name = directory.name
        self.tied = tied
        self.quantization = read_quantization(directory)
        self.files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                with enough_memory(f"it has no room for {path}: raise that limit, or take a smaller model"):
                    file = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise ConfigError(f"{path} is not there: download it again") from None
            except SafetensorError as error:
                why = one_line(error)
                raise ConfigError(f"{path} is not a readable safetensors file ({why}): download it again") from None
            except OSError as error:
                raise ConfigError(f"{path} cannot be read ({one_line(error)})") from None
            self.files.update(dict.fromkeys(file.keys(), file))
        self.wholes = _stems(self.files, _HEAD)
        self.parts = _stems(self.files, _EMBEDDING.removeprefix(_BARE))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor `name`, None where there is none. Raises ConfigError for what it is quantized to."""
        stored = self._stored(name)
        if stored is None:
            stacked = self._stacked(name)
            return None if stacked is None else stacked.shape
        matrix = self._quantized(stored)
        return tuple(self.files[stored].get_slice(stored).get_shape()) if matrix is None else matrix.shape

    def copy_into(self, name: str, out: Tensor) -> None:
        """Copy the tensor `name` into `out` (its shape, any float dtype and device). Raises ConfigError."""
        stored = self._stored(name)
        if stored is None:
            stacked = self._stacked(name)
            assert stacked is not None
            self._check_plain(name, stacked.stack)
            out.copy_(stacked.read())
            return
        matrix = self._quantized(stored)
        if matrix is not None:
            matrix.copy_into(out)
            return
        self._check_plain(name, self.files[stored].get_slice(stored))
        out.copy_(self.files[stored].get_tensor(stored))

    def _check_plain(self, name: str, lazy: Any) -> None:
        dtype = lazy.get_dtype()
        if dtype not in ("F64", "F32", "F16", "BF16"):
            raise ConfigError(f"{self.name}: tensor {name} is stored as {dtype}: only F64, F32, F16 and BF16 are read")

    def _quantized(self, stored: str) -> QuantizedMatrix | None:
        layer, _, kind = stored.rpartition(".")
        if self.quantization is None or kind != "weight":
            return None
        linear = StoredLinear(f"{self.name}: {layer}", lambda part: self._tensor(f"{layer}.{part}"))
        return quantized_matrix(linear, self.quantization.of(layer))

    def _tensor(self, stored: str) -> Tensor | None:
        return self.files[stored].get_tensor(stored) if stored in self.files else None

    def _stored(self, name: str) -> str | None:
        """The name that the file has for a tensor, or would have if it were not quantized."""
        return next((each for each in self._names(name) if each in self.files or self._packed(each)), None)

    def _stacked(self, name: str) -> InStack | None:
        """Where a matrix of an expert lies in one of all experts."""
        found = (in_stack(self.files, each) for each in self._names(name))
        return next((each for each in found if each is not None), None)

    def _names(self, name: str) -> list[str]:
        names = [name, name.removeprefix(_BARE), *(stem + name for stem in self.wholes)]
        if name.startswith(_BARE):
            names += [stem + name.removeprefix(_BARE) for stem in self.parts]
        if self.tied and name == _EMBEDDING:
            names.append(_HEAD)
        return names

    def _packed(self, name: str) -> bool:
        layer, _, kind = name.rpartition(".")
        return (
            self.quantization is not None
            and kind == "weight"
            and any(f"{layer}.{part}" in self.files for part in PACKED)
        )


def _stems(names: Iterable[str], ending: str) -> list[str]:
    """What stands before `ending` in the names that have it, but for nothing at all."""
    return sorted({name.removesuffix(ending) for name in names if name.endswith(f".{ending}")})


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ConfigError(f"{index} holds no weight_map from tensors to files: download it again")
        return [directory / name for name in sorted(set(shards.values()))]
    others = ("consolidated", "adapter_model")
    files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(others))
    if files:
        return files
    refuse_lora(directory)
    if any(directory.glob("*.bin")):
        raise ConfigError(
            f"{directory.name} holds pickled weights only (.bin), which are never read: save it as safetensors"
        )
    packed = sorted(path.name for path in directory.glob("*.gguf") if not path.name.startswith("mmproj"))
    if packed:
        raise ConfigError(
            f"{directory} holds no .safetensors file: to have its {packed[0]} read, give that file's path"
        )
    raise ConfigError(f"{directory} holds no weights: there is no .safetensors file")


def _tensors_to_read(checkpoint: Checkpoint, config: ModelConfig, model: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is there and has a use. Raises ConfigError as `checked`."""
    wanted = checked(checkpoint, _wanted_tensors(config), model)
    if checkpoint.shape(_HEAD) == wanted[_EMBEDDING]:  # which a tied checkpoint may have too, trained apart
        wanted[_HEAD] = wanted[_EMBEDDING]
    return wanted


def shapes_to_load(source: ModelSource, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `load_tensors` reads; of the files, headers alone are read.

    Raises ConfigError where one that the decoder needs is not there or cannot be read.
    """
    with open_checkpoint(source, config) as checkpoint:
        return _tensors_to_read(checkpoint, config, source.name)


def numbers_to_load(source: ModelSource, config: ModelConfig) -> tuple[int, int]:
    """How many numbers `load_weights` reads in layers, and beside them. Raises ConfigError as `shapes_to_load`."""
    sizes = {name: prod(shape) for name, shape in shapes_to_load(source, config).items()}
    in_layers = sum(size for name, size in sizes.items() if name.startswith(_LAYERS))
    return in_layers, sum(sizes.values()) - in_layers


def _wanted_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the decoder needs, as transformers calls them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention: tuple[tuple[str, int], ...] = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    mlp: tuple[tuple[str, int], ...] = (("gate_proj", inner), ("up_proj", inner))
    if config.architecture in _FUSED_ATTENTION:
        attention = (("qkv_proj", q_size + 2 * kv_size),)
    if config.architecture in _FUSED_MLP:
        mlp = (("gate_up_proj", 2 * inner),)
    of_attention = (
        *((f"self_attn.{name}", rows, hidden, config.qkv_bias) for name, rows in attention),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
    )
    of_mlp = (
        *((f"mlp.{name}", rows, hidden, config.mlp_bias) for name, rows in mlp),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    yield _EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        experts = config.experts if config.experts is not None and layer in config.experts.layers else None
        if experts is not None:
            yield from ((prefix + name, shape) for name, shape in expert_tensors(config, experts))
        for projection, rows, columns, bias in (*of_attention, *(of_mlp if experts is None else ())):
            yield f"{prefix}{projection}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{projection}.bias", (rows,)
        for norm in _norm_names(config).values():
            yield f"{prefix}{norm}.weight", (hidden,)
        if config.qk_norm or config.wide_qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (q_size if config.wide_qk_norm else config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (kv_size if config.wide_qk_norm else config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_head:
        yield _HEAD, (config.vocab_size, hidden)


def _read_layer(index: int, config: ModelConfig, read: Callable[..., Tensor]) -> LayerWeights:
    attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    qkv = [f"{attention}{part}_proj" for part in (("qkv",) if config.architecture in _FUSED_ATTENTION else "qkv")]
    gate_up = [f"{mlp}{part}_proj" for part in (("gate_up",) if config.architecture in _FUSED_MLP else ("gate", "up"))]

    def weight(*stems: str) -> Tensor:
        return read(*(f"{stem}.weight" for stem in stems))

    def bias(present: bool, *stems: str) -> Tensor | None:
        return read(*(f"{stem}.bias" for stem in stems)) if present else None

    qkv_bias = bias(config.qkv_bias, *qkv)
    norms: dict[str, Tensor | None] = dict.fromkeys(("input_norm", "post_norm", "q_norm", "k_norm"))
    for norm, name in _norm_names(config).items():
        norms[norm] = _norm(weight(f"model.layers.{index}.{name}"), config)
    for part in "qk" if config.qk_norm or config.wide_qk_norm else "":
        norm = f"all_{part}_norm" if config.wide_qk_norm else f"{part}_norm"
        norms[norm] = _norm(_in_halves(weight(f"{attention}{part}_norm"), config), config)
    attending: dict[str, Any] = {
        **norms,
        "qkv": _in_halves(weight(*qkv), config),
        "qkv_bias": None if qkv_bias is None else _in_halves(qkv_bias, config),
        "o": weight(f"{attention}o_proj"),
        "o_bias": bias(config.o_bias, f"{attention}o_proj"),
    }
    if config.experts is not None and index in config.experts.layers:
        return LayerWeights(**attending, **_read_experts(f"model.layers.{index}.", config, config.experts, read))
    return LayerWeights(
        **attending,
        gate_up=weight(*gate_up),
        gate_up_bias=bias(config.mlp_bias, *gate_up),
        down=weight(f"{mlp}down_proj"),
        down_bias=bias(config.mlp_bias, f"{mlp}down_proj"),
    )


def _read_experts(prefix: str, config: ModelConfig, experts: Experts, read: Callable[..., Tensor]) -> dict[str, Any]:
    """What a layer with experts has in place of an MLP."""
    names = expert_names(config)
    gate, up, down = names.parts
    router = [f"{prefix}{names.router}.weight"]
    if experts.shared_gated:
        router.append(f"{prefix}{names.shared_gate}.weight")
    rows, shared = read(*router), f"{prefix}{names.shared}"
    if names.together is not None:
        gate_up, downs = (read(prefix + name) for name in names.together)
    else:
        stems = [prefix + names.expert.format(expert) for expert in range(experts.count)]
        gate_up = read(*(f"{stem}{part}.weight" for stem in stems for part in (gate, up)))
        downs = read(*(f"{stem}{down}.weight" for stem in stems))
        gate_up, downs = (each.unflatten(0, (experts.count, -1)) for each in (gate_up, downs))
    return {
        "router": F.pad(rows, (0, 0, 0, router_rows(experts) - len(rows))),
        "expert_bias": read(f"{prefix}{names.bias}", kept=torch.float32).flatten() if experts.biased else None,
        "gate_up": gate_up,
        "gate_up_bias": None,
        "down": downs,
        "down_bias": None,
        "shared_gate_up": read(f"{shared}{gate}.weight", f"{shared}{up}.weight") if experts.shared_inner else None,
        "shared_down": read(f"{shared}{down}.weight") if experts.shared_inner else None,
    }


def _norm_names(config: ModelConfig) -> dict[str, str]:
    return _GEMMA_NORMS if config.architecture == "gemma3_text" else _NORMS[config.norms]


def _norm(weight: Tensor, config: ModelConfig) -> Tensor:
    """What a norm multiplies by. Gemma's checkpoints store it minus 1."""
    return (weight.float() + 1).to(weight.dtype) if config.norms_less_one else weight


def _in_halves(qkv: Tensor, config: ModelConfig) -> Tensor:
    """The fused projection's weight or bias, or a norm of its q or k, with the coordinates that turn together half a
    head apart (`rope.py`)."""
    order = paired_as_stored(config)
    if order is not None:
        turning = qkv[: (config.heads + config.kv_heads) * config.head_dim].unflatten(0, (-1, config.head_dim))
        turning.copy_(turning[:, order.to(qkv.device)])
    return qkv
