"""From what a user chose to an engine that is ready to serve."""

import gc
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

import psutil
import torch
from torch import Tensor

from tidar_core.config import ConfigError, EngineConfig, KVDType, ModelConfig, RoundedDType
from tidar_core.engine.cost_cache import cost_file, known_cost
from tidar_core.engine.draft_policy import DraftPolicy
from tidar_core.engine.engine import Engine, EngineInfo
from tidar_core.engine.grammars import Grammars
from tidar_core.engine.graphs import Graphs, Reach, cuda_capture, left_free
from tidar_core.engine.pages import PagePool
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import Limits, Scheduler
from tidar_core.engine.step_cost import StepCost
from tidar_core.engine.warmup import capture_graphs, check_cost, fly_once, measure_cost, rows_are_exact, with_own_pages
from tidar_core.kernels.cpu import cpu_ops, supports
from tidar_core.kernels.cpu_build import CompileError, cache_directory
from tidar_core.kernels.ops import Ops, empty_cache, rotary_tables
from tidar_core.kernels.reference import REFERENCE_OPS, rounding_pages
from tidar_core.layout import BlockForm
from tidar_core.model.adapter import Adapter, default_adapter_for, identify_base, load_adapter
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.contract import read_contract, read_own_drafter, stated_architecture
from tidar_core.model.decoder import all_layers
from tidar_core.model.float8 import FLOAT8, matrices, packed, rounded
from tidar_core.model.loading import load_weights
from tidar_core.model.own_drafter import own_drafter
from tidar_core.model.rope import is_long, stretched
from tidar_core.model.sampling_defaults import read_sampling_defaults
from tidar_core.model.second_view import load_second_view, read_second_view
from tidar_core.model.sources import ModelSource, find_model, from_home
from tidar_core.model.tokenizer import load_tokenizer, with_all_ends
from tidar_core.model.weights import pack_adapter, pack_model
from tidar_core.request import Sampling
from tidar_core.transfer import arithmetic_dtype, choose_device, enough_memory

GIB = 2**30
CPU_CACHE_SHARE, CPU_CACHE_MOST = 0.2, 2 * GIB
GPU_CACHE_SHARE = 0.85  # of the memory that is free once the weights are loaded
_DECIDES_COST = {"kind", "rank", "projections", "slot_head", "block_length"}  # of what a drafter says of itself


def load_engine(
    config: EngineConfig,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    stage: Callable[[str], None] | None = None,
    for_grammars: bool = False,
) -> Engine:
    """Loads weights and drafter, proves exactness, measures costs. Raises ConfigError with one line for the user.

    report gets a line for the log at each stage, and for what a user should know of; with `stage`, that gets the
    former. progress gets (weights read, weights in all). for_grammars: also makes ready what the first request under a
    grammar would wait for.
    """
    stage = stage or report
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    dtype = arithmetic_dtype(config.dtype)
    source = find_model(config.model)
    model = stretched(load_config(source, stated_architecture(config.adapter)), config.max_model_len)
    stage(f"reading {source.name}")
    tokenizer = load_tokenizer(source)  # first: what is wrong with it is told before many gigabytes are read
    model = with_all_ends(model, source, tokenizer)
    grammars = Grammars(tokenizer, model.vocab_size, model.eos_ids)
    tokens_read = [grammars.read_tokens()] if for_grammars else []
    sampling_defaults = read_sampling_defaults(source, report) if config.generation_config == "auto" else Sampling()
    with enough_memory(f"it does not hold the weights of {source.name}: take a smaller model, or a larger GPU"):
        weights = load_weights(source, model, dtype, device, progress)
    base = identify_base(source.name, model, weights, tokenizer)
    with enough_memory(f"it does not hold the drafter beside {source.name}: take a larger GPU, or --adapter none"):
        adapter = _adapter(config.adapter, source, model, base, weights.embedding, report)
    ops = _ops(config, model, dtype, device, report)
    ops, kv_dtype = _in_8_bits(config, ops, dtype, report)

    vocabulary = weights.head if adapter is not None and adapter.weights.slot_head is not None else None
    with enough_memory(f"it does not hold {source.name} while it is packed: take a smaller model, or a larger GPU"):
        weights = pack_model(weights, ops.pack, ops.pack_head, ops.pack_adapter)
        drafter = pack_adapter(adapter.weights, ops.pack_adapter, ops.pack) if adapter else None
    adapter = replace(adapter, weights=drafter) if adapter and drafter else None  # nothing holds what was packed
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what packing has freed counts as free memory for the pages

    if config.drafts == "full" and adapter is None:
        report("there is no drafter: drafts 'full' changes nothing")
    positions, pages = _room(config, model, kv_dtype, device, report)
    cache = empty_cache(model, pages + 1, config.page_size, kv_dtype, device)
    layers = all_layers(ops, model, weights, drafter, rotary_tables(model, device))
    graphs = _graphs(config, model, ops, adapter, positions, device)
    mask_token = adapter.mask_token if adapter else None
    form = adapter.config.form if adapter else BlockForm()
    runner = Runner(ops, model, weights, drafter, cache, layers, vocabulary, graphs, mask_token, form)
    arithmetic = _arithmetic(ops, device, config.kv_dtype, is_long(model))
    stage("checking exactness and measuring step costs")
    wait(tokens_read)  # else it would count among the costs of steps
    trial = with_own_pages(runner)  # held until the graphs are captured: its own share a pool that ends with the last
    exact, cost = _proven(config, trial, adapter, base.fingerprint, arithmetic)
    limits = Limits(config.max_running, config.known_rows, positions, config.page_size, frozenset(model.eos_ids))
    info = EngineInfo(
        model=source.name,
        adapter=adapter.name if adapter else None,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=device.type,
        exact=exact,
        block_length=runner.block_length,
        form=form,
        expected_holds=adapter.config.holds if adapter else (),
        max_model_len=positions,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        sampling_defaults=sampling_defaults,
        pages=pages,
        page_size=config.page_size,
        max_running=config.max_running,
        fingerprint=base.fingerprint,
        arithmetic=arithmetic,
        mask_token=mask_token,
        cost=cost,
    )
    if graphs is not None:
        stage("capturing CUDA graphs")
        capture_graphs(runner, progress, report)
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    if overlap:
        fly_once(runner, cost)
    if for_grammars:
        grammars.start_guard()
    stage(_ready_line(info, ops))
    policy = DraftPolicy(runner.block_length, cost, info.expected_holds, overlap)
    return Engine(info, tokenizer, grammars, runner, Scheduler(PagePool(pages), policy, limits), overlap)


def keep_loaded() -> None:
    """What was loaded stays as long as the process: else the garbage collector walks through it between steps."""
    gc.collect()
    gc.freeze()


def _adapter(
    wanted: str,
    source: ModelSource,
    model: ModelConfig,
    base: BaseIdentity,
    embedding: Tensor,
    report: Callable[[str], None],
) -> Adapter | None:
    if wanted == "none":
        return None
    if wanted == "default" and source.gguf_file is None:
        contract = read_own_drafter(source.directory)
        if contract is not None:
            return own_drafter(contract, base, model, embedding)
        second_view = read_second_view(source.directory)
        if second_view is not None:
            return load_second_view(second_view, source, model, base, embedding)
    path = default_adapter_for(base) if wanted == "default" else from_home(wanted)
    if path is None:
        report("no drafter adapter is shipped for this model: answers come without drafts")
        return None
    if path.is_file():
        return own_drafter(read_contract(path), base, model, embedding)
    return load_adapter(path, base, embedding.dtype, embedding.device, report)


def _in_8_bits(
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
    """Rounds in place: what is packed is taken (`pack_model`)."""

    def rounded_and_packed(weight: Tensor) -> Tensor:
        for matrix in matrices(weight):
            matrix.copy_(rounded(matrix))
        return pack(weight)

    return rounded_and_packed


def _rounded(config: EngineConfig) -> RoundedDType | None:
    return config.dtype if config.dtype == "int8" or config.dtype == "int4" else None


def _ops(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, report: Callable[[str], None]
) -> Ops:
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
            model, dtype, device, exact=config.exact, float8=float8, overlap=config.overlap_launches
        )
    report("the Triton kernels do not fit this model's sizes: running on plain torch, which is slower")
    return REFERENCE_OPS


def _room(
    config: EngineConfig,
    model: ModelConfig,
    kv_dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> tuple[int, int]:
    """Positions that a request may use, and pages for keys and values."""
    if config.max_model_len > model.max_positions:
        report(f"the model has {model.max_positions} positions: max_model_len {config.max_model_len} gives it no more")
    if model.stretches_to is not None and not is_long(model):
        report(
            f"requests are limited to {model.max_positions} positions: where max_model_len asks for more, up to "
            f"{model.stretches_to}, all are computed by the model's frequencies for long texts"
        )
    positions = min(model.max_positions, config.max_model_len or model.max_positions)
    pages = _cache_pages(config, model, kv_dtype, device, positions)
    if pages * config.page_size < positions:
        positions = pages * config.page_size
        report(f"memory for K/V limits requests to {positions} positions")
    return positions, pages


def _graphs(
    config: EngineConfig, model: ModelConfig, ops: Ops, adapter: Adapter | None, positions: int, device: torch.device
) -> Graphs | None:
    """Where steps are captured, on a GPU; none where they are not, or cannot be."""
    if not config.graphs or device.type != "cuda" or ops.name == REFERENCE_OPS.name:
        return None
    scored = config.max_running * (adapter.config.block_length if adapter else 1)
    capture = cuda_capture(device, left_free(scored, model.vocab_size))
    return Graphs(capture, Reach(config.max_running, -(-positions // config.page_size)))


def _cache_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int
) -> int:
    """Pages to hold, at least one; no more than all sequences at their longest could use. Raises ConfigError where
    there is no memory for one, or for those that are asked for."""
    most = -(-positions // config.page_size) * config.max_running
    head_bytes = model.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FLOAT8 else 0)
    page_bytes = 2 * model.layers * model.kv_heads * config.page_size * head_bytes
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        room = GPU_CACHE_SHARE * free
    else:
        free = psutil.virtual_memory().available
        room = min(CPU_CACHE_SHARE * free, CPU_CACHE_MOST)
    if config.cache_tokens:
        pages = max(1, min(most, config.cache_tokens // config.page_size))
        if pages * page_bytes > free:
            raise ConfigError(
                f"keys and values of {pages * config.page_size} tokens want {pages * page_bytes / GIB:.1f} GiB, and "
                f"{free / GIB:.1f} GiB are free on {device.type}: lower cache_tokens"
            )
        return pages
    if room < page_bytes:
        raise ConfigError(
            f"no memory is left for keys and values beside the weights of {model.architecture}: free some on "
            f"{device.type}, or serve the model in fewer bits (--dtype)"
        )
    return min(most, int(room) // page_bytes)


def _proven(
    config: EngineConfig, trial: Runner, adapter: Adapter | None, fingerprint: str, arithmetic: str
) -> tuple[bool, StepCost]:
    """Whether the loaded model is exact, and what its steps cost."""
    exact = rows_are_exact(trial)
    path = cost_file(
        cache_directory(), weights=fingerprint, dtype=config.dtype, arithmetic=arithmetic,
        drafter=adapter and adapter.config.model_dump(include=_DECIDES_COST),
        threads=torch.get_num_threads(), page_size=config.page_size, exact=config.exact,
        graphs=trial.graphs is not None, overlap_launches=config.overlap_launches,
    )  # fmt: skip
    return exact, known_cost(path, lambda: measure_cost(trial), lambda known: check_cost(trial, known))


def _arithmetic(ops: Ops, device: torch.device, kv_dtype: KVDType, long: bool) -> str:
    """What decides a row's bits beside the weights and their dtype."""
    if device.type == "cuda":
        on = torch.cuda.get_device_name(device)
    else:
        extras = {"BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
        on = " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, there in extras.items() if there)])
    pages = "" if kv_dtype == "model" else f", {kv_dtype} K/V"
    return f"{ops.name} kernels, torch {torch.__version__}, {on}{pages}{', long texts' if long else ''}"


def _ready_line(info: EngineInfo, ops: Ops) -> str:
    drafter = f"drafter {info.adapter}, block {info.block_length}" if info.adapter else "no drafter"
    exact = "exact: a token's bits do not depend on its batch" if info.exact else "not exact: ties may fall differently"
    pages = "" if info.kv_dtype == "model" else f", K/V in {info.kv_dtype}"
    return f"ready: {info.model} in {info.dtype}{pages} on {info.device} ({ops.name} kernels), {drafter}; {exact}"
