"""Which kernels an engine runs on: of a GPU, of a CPU, or plain torch where neither can be had."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.config import ConfigError, EngineConfig, KVDType, ModelConfig, RoundedDType
from tidar_core.kernels.cpu import cpu_ops, supports
from tidar_core.kernels.cpu_build import CompileError
from tidar_core.kernels.ops import Ops, Rotary
from tidar_core.kernels.reference import REFERENCE_OPS, rounding_pages
from tidar_core.kernels.sources import code_digest
from tidar_core.model.float8 import FLOAT8, matrices, packed, rounded
from tidar_core.model.weights import AdapterWeights, ModelWeights


def ops_for(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, report: Callable[[str], None]
) -> Ops:
    """What the decoder runs on there; report gets a line where that is slower than it might be. Raises ConfigError for
    a dtype that cannot be had."""
    rounded = _rounded(config)
    if device.type != "cpu":
        if rounded:
            raise ConfigError(f"{rounded} is for CPUs: use --dtype bfloat16 or float8 on a GPU, or --device cpu")
        return _gpu_ops(config, model, dtype, device, report)
    if not supports(model, config.page_size):
        if rounded:
            raise ConfigError(f"the {rounded} kernels do not fit this model's sizes: use --dtype bfloat16")
        report("the CPU kernels do not fit this model's sizes: running on plain torch, which is slower")
        return REFERENCE_OPS
    try:
        return cpu_ops(model, dtype, rounded)
    except CompileError as error:
        if rounded:
            raise ConfigError(f"{rounded} cannot be used here ({error}): use --dtype bfloat16") from None
        report(f"running on plain torch, which is slower: {error}")
        return REFERENCE_OPS


def _gpu_ops(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, report: Callable[[str], None]
) -> Ops:
    try:
        from tidar_core.kernels import triton_ops
    except ImportError:
        mend = "pip install -e '.[cuda]' in the repository"
        report(f"triton is not installed ({mend}): running on plain torch, which is slower")
        return REFERENCE_OPS
    if triton_ops.supports(model, config.page_size):
        float8 = config.dtype == "float8"
        if float8 and not config.exact:
            raise ConfigError("--no-exact multiplies by torch's products, which have no float8: leave one of them out")
        return triton_ops.triton_ops(
            model, dtype, device, exact=config.exact, float8=float8, overlap_launches=config.overlap_launches
        )
    report("the Triton kernels do not fit this model's sizes: running on plain torch, which is slower")
    return REFERENCE_OPS


def _rounded(config: EngineConfig) -> RoundedDType | None:
    return config.dtype if config.dtype == "int8" or config.dtype == "int4" else None


def in_8_bits(
    config: EngineConfig, ops: Ops, dtype: torch.dtype, report: Callable[[str], None]
) -> tuple[Ops, torch.dtype]:
    """The operations with what shall be in float8 rounded to it where they do not keep it so; the dtype of pages."""
    kept_as = str(dtype).removeprefix("torch.")
    if config.dtype == "float8" and ops.pack is not packed:
        report(f"float8 saves no memory and no time here: weights are rounded to it and kept in {kept_as}")
        ops = replace(ops, pack=_rounding_first(ops.pack))
    if config.kv_dtype == "model":
        return ops, dtype
    if ops.float8_pages:
        return ops, FLOAT8
    report(f"float8 K/V saves no memory here: it is rounded and kept in {kept_as}")
    return replace(ops, bind_layers=None, rotate_and_store=rounding_pages(ops.rotate_and_store)), dtype


def _rounding_first(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Rounds in place: what is packed is consumed (`pack_layer`)."""

    def rounded_and_packed(weight: Tensor) -> Tensor:
        for matrix in matrices(weight):
            matrix.copy_(rounded(matrix))
        return pack(weight)

    return rounded_and_packed


def one_by_one(ops: Ops, weights: ModelWeights, adapter: AdapterWeights | None, rotary: Rotary) -> bool:
    """Whether a GPU computes a model's layers one operation at a time since `Ops.bind_layers` does not support them:
    such layers have other bits there than those of one call, which a narrower adapter might get."""
    on_gpu = weights.embedding.device.type == "cuda"
    return on_gpu and ops.bind_layers is not None and ops.bind_layers(weights, adapter, rotary) is None


def arithmetic_of(ops: Ops, device: torch.device, kv_dtype: KVDType, long: bool, one_by_one: bool) -> str:
    """What decides a row's bits beside the weights and their dtype. one_by_one: see `one_by_one`."""
    if device.type == "cuda":
        on = torch.cuda.get_device_name(device)
    else:
        extras = {"BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
        on = " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, there in extras.items() if there)])
    decides = [f"{ops.name} kernels {code_digest()}", f"torch {torch.__version__}", on]
    if one_by_one:
        decides.append("layers one by one")
    if kv_dtype != "model":
        decides.append(f"{kv_dtype} K/V")
    if long:
        decides.append("long texts")
    return ", ".join(decides)
