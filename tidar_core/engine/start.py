"""From what a user chose to an engine that is ready to serve."""

import gc
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError, EngineConfig, ModelConfig
from tidar_core.engine.cost_cache import cost_file, known_cost
from tidar_core.engine.draft_policy import DraftPolicy
from tidar_core.engine.engine import Engine, EngineInfo
from tidar_core.engine.grammars import Grammars
from tidar_core.engine.graphs import NARROWEST, Graphs, Reach, cuda_capture, left_free, narrow_buckets, results_bytes
from tidar_core.engine.ops_choice import arithmetic_of, in_8_bits, one_by_one, ops_for
from tidar_core.engine.pages import PagePool
from tidar_core.engine.room import GIB, full_rows_for, prompt_seconds_for, room_for, row_bytes
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import Limits, Scheduler
from tidar_core.engine.step_cost import StepCost
from tidar_core.engine.warmup import (
    TRIAL_BYTES,
    capture_graphs,
    check_cost,
    fly_once,
    measure_cost,
    rows_are_exact,
    with_own_pages,
)
from tidar_core.kernels.cpu_build import cache_directory
from tidar_core.kernels.ops import PARTIAL_BYTES, Ops, Rotary, empty_cache, rotary_tables
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.layout import BlockForm
from tidar_core.memory import free_memory
from tidar_core.model.adapter import Adapter, default_adapter_for, load_adapter, shape_of
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.contract import read_contract, read_own_drafter, stated_architecture
from tidar_core.model.decoder import all_layers
from tidar_core.model.fingerprint import Prints
from tidar_core.model.footprint import weights_bytes
from tidar_core.model.loading import load_weights
from tidar_core.model.own_drafter import own_drafter
from tidar_core.model.rope import is_long, stretched
from tidar_core.model.sampling_defaults import read_sampling_defaults
from tidar_core.model.second_view import load_second_view, read_second_view
from tidar_core.model.sources import ModelSource, find_model, from_home
from tidar_core.model.tokenizer import load_tokenizer, with_all_ends
from tidar_core.model.weights import ModelWeights, pack_adapter, pack_layer
from tidar_core.request import Sampling
from tidar_core.transfer import arithmetic_dtype, choose_device, enough_memory, give_back_memory

_DECIDES_COST = frozenset(("kind", "rank", "projections", "slot_head", "block_length"))  # of a drafter's own account


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model and its drafter as the kernels that they run on keep them.

    vocabulary: the head's rows as the slot head corrects them, before they are packed; None without a slot head.
    """

    model: ModelConfig
    base: BaseIdentity
    identity: str
    weights: ModelWeights
    adapter: Adapter | None
    vocabulary: Tensor | None
    ops: Ops
    kv_dtype: torch.dtype


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
    source = find_model(config.model)
    model = stretched(load_config(source, stated_architecture(config.adapter)), config.max_model_len)
    stage(f"reading {source.name}")
    tokenizer = load_tokenizer(source)  # first: what is wrong with it is told before many gigabytes are read
    model = with_all_ends(model, source, tokenizer)
    grammars = Grammars(tokenizer, model.vocab_size, model.eos_ids)
    tokens_read = [grammars.read_tokens()] if for_grammars else []
    sampling_defaults = read_sampling_defaults(source, report) if config.generation_config == "auto" else Sampling()
    loaded = _load(config, source, model, tokenizer, device, report, progress)

    rotary = rotary_tables(model, device)
    beside = _kept_for_graphs(config, loaded, device)
    positions, pages = room_for(config, model, loaded.kv_dtype, device, report, beside)
    runner = _runner(config, loaded, rotary, positions, pages, device)
    stage("checking exactness and measuring step costs")
    wait(tokens_read)  # else it would count among the costs of steps
    trial = with_own_pages(runner)  # held until the graphs are captured: its own share a pool that ends with the last
    apart = one_by_one(loaded.ops, loaded.weights, runner.adapter, rotary)
    arithmetic = arithmetic_of(loaded.ops, device, config.kv_dtype, is_long(model), apart)
    exact, cost = _proven(config, trial, loaded.adapter, loaded.base.fingerprint, arithmetic)
    if runner.graphs is not None:
        stage("capturing CUDA graphs")
        capture_graphs(runner, progress, report)
    overlap_steps = device.type == "cuda" if config.overlap_steps is None else config.overlap_steps
    if overlap_steps:
        fly_once(runner, cost)
    del trial
    if for_grammars:
        grammars.start_guard()

    adapter = loaded.adapter
    info = EngineInfo(
        model=source.name,
        adapter=adapter.name if adapter else None,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=device.type,
        exact=exact,
        block_length=runner.block_length,
        form=runner.form,
        expected_acceptance=adapter.config.holds if adapter else (),
        max_model_len=positions,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        sampling_defaults=sampling_defaults,
        pages=pages,
        page_size=config.page_size,
        max_running=config.max_running,
        fingerprint=loaded.base.fingerprint,
        identity=loaded.identity,
        arithmetic=arithmetic,
        mask_token=runner.mask_token,
        cost=cost,
        full_rows=full_rows_for(model, runner.block_length, arithmetic_dtype(config.dtype), device, cost),
    )
    stage(_ready_line(info, loaded.ops))
    limits = Limits(
        config.max_running, config.known_rows, positions, config.page_size, frozenset(model.eos_ids),
        prompt_seconds_for(device),
    )  # fmt: skip
    policy = DraftPolicy(runner.block_length, cost, info.expected_acceptance, overlap_steps, info.full_rows)
    return Engine(info, tokenizer, grammars, runner, Scheduler(PagePool(pages), policy, limits), overlap_steps)


def keep_loaded() -> None:
    """Tells the garbage collector that what was loaded stays: else it walks through all of it between steps."""
    gc.collect()
    gc.freeze()


def _load(
    config: EngineConfig,
    source: ModelSource,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> _Loaded:
    dtype = arithmetic_dtype(config.dtype)
    ops, kv_dtype = in_8_bits(config, ops_for(config, model, dtype, device, report), dtype, report)
    if device.type == "cpu":
        _check_memory(config, source, model, packed=ops.pack_head is not REFERENCE_OPS.pack_head)
    prints = Prints()
    with enough_memory(f"it does not hold the weights of {source.name}: take a smaller model, or a larger GPU"):
        weights = load_weights(
            source, model, dtype, device, progress,
            told=prints.told, packed=lambda layer: pack_layer(layer, ops.pack, ops.pack_adapter),
        )  # fmt: skip
    base = shape_of(source.name, model, tokenizer, prints.fingerprint())
    all_of_it = prints.identity(base, model)
    with enough_memory(f"it does not hold the drafter beside {source.name}: take a larger GPU, or --adapter none"):
        adapter = _adapter(config.adapter, source, model, base, weights.embedding, report)
    if config.drafts == "full" and adapter is None:
        report("there is no drafter: drafts 'full' changes nothing")
    vocabulary = weights.head if adapter is not None and adapter.weights.slot_head is not None else None
    with enough_memory(f"it does not hold {source.name} while it is packed: take a smaller model, or a larger GPU"):
        weights = replace(weights, head=ops.pack_head(weights.head))
        drafter = pack_adapter(adapter.weights, ops.pack_adapter, ops.pack) if adapter else None
    adapter = replace(adapter, weights=drafter) if adapter and drafter else None  # nothing holds what was packed
    give_back_memory(device)
    return _Loaded(model, base, all_of_it, weights, adapter, vocabulary, ops, kv_dtype)


def _check_memory(config: EngineConfig, source: ModelSource, model: ModelConfig, packed: bool) -> None:
    """Raises ConfigError where what is served plainly does not fit: the system would end this process, or another,
    without a word after minutes of reading. Swap, on which nothing could be served, is not counted. packed: as in
    `weights_bytes`."""
    if psutil.MACOS:  # which lends as much of its disk as is needed
        return
    needed, free = weights_bytes(source, model, config.dtype, packed), free_memory()
    if needed > free:
        raise ConfigError(
            f"{source.name} takes {needed / GIB:.1f} GiB of memory in {config.dtype}, and {free / GIB:.1f} GiB are "
            "free: free some, serve it in fewer bits (--dtype), or take a smaller model"
        )


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


def _runner(
    config: EngineConfig, loaded: _Loaded, rotary: Rotary, positions: int, pages: int, device: torch.device
) -> Runner:
    model, ops, adapter = loaded.model, loaded.ops, loaded.adapter
    drafter = adapter.weights if adapter else None
    return Runner(
        ops,
        model,
        loaded.weights,
        drafter,
        empty_cache(model, pages + 1, config.page_size, loaded.kv_dtype, device),
        all_layers(ops, model, loaded.weights, drafter, rotary),
        loaded.vocabulary,
        _graphs(config, model, ops, adapter, positions, device),
        adapter.mask_token if adapter else None,
        adapter.config.form if adapter else BlockForm(),
    )


def _graphs(
    config: EngineConfig, model: ModelConfig, ops: Ops, adapter: Adapter | None, positions: int, device: torch.device
) -> Graphs | None:
    """Where steps are captured, on a GPU; none where they are not, or cannot be."""
    if not _captures(config, ops, device):
        return None
    capture = cuda_capture(device, left_free(_scored(config, adapter), model.vocab_size))
    return Graphs(capture, Reach(config.max_running, -(-positions // config.page_size)))


def _captures(config: EngineConfig, ops: Ops, device: torch.device) -> bool:
    return config.graphs and device.type == "cuda" and ops.name != REFERENCE_OPS.name


def _scored(config: EngineConfig, adapter: Adapter | None) -> int:
    """Rows that a step gives scores to, about."""
    return config.max_running * (adapter.config.block_length if adapter else 1)


def _kept_for_graphs(config: EngineConfig, loaded: _Loaded, device: torch.device) -> int:
    """Bytes that pages leave free, so that all steps can be captured that are to be, by estimate."""
    if not _captures(config, loaded.ops, device):
        return 0
    block = loaded.adapter.config.block_length if loaded.adapter else 0
    sizes = narrow_buckets(Reach(config.max_running, NARROWEST), block)
    itemsize = arithmetic_dtype(config.dtype).itemsize
    results = results_bytes(sizes, loaded.model.hidden_size, itemsize)
    computed = max(size.verify + size.mask for size in sizes) * row_bytes(loaded.model, itemsize) + PARTIAL_BYTES
    shared = 2 * computed + TRIAL_BYTES  # by the graphs' pool, and by torch for the runs before captures
    return left_free(_scored(config, loaded.adapter), loaded.model.vocab_size) + results + shared


def _proven(
    config: EngineConfig, trial: Runner, adapter: Adapter | None, fingerprint: str, arithmetic: str
) -> tuple[bool, StepCost]:
    """Whether the loaded model is exact, and what its steps cost."""
    exact = rows_are_exact(trial)
    path = cost_file(
        cache_directory(), weights=fingerprint, dtype=config.dtype, arithmetic=arithmetic,
        drafter=adapter and adapter.config.model_dump(include=set(_DECIDES_COST)),
        threads=torch.get_num_threads(), page_size=config.page_size, exact=config.exact,
        graphs=trial.graphs is not None, overlap_launches=config.overlap_launches,
    )  # fmt: skip
    return exact, known_cost(path, lambda: measure_cost(trial), lambda known: check_cost(trial, known))


def _ready_line(info: EngineInfo, ops: Ops) -> str:
    drafter = f"drafter {info.adapter}, block {info.block_length}" if info.adapter else "no drafter"
    exact = "exact: a token's bits do not depend on its batch" if info.exact else "not exact: ties may fall differently"
    pages = "" if info.kv_dtype == "model" else f", K/V in {info.kv_dtype}"
    return f"ready: {info.model} in {info.dtype}{pages} on {info.device} ({ops.name} kernels), {drafter}; {exact}"
