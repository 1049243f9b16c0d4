"""How much room an engine has: positions of a request, pages for keys and values, and what a step may take."""

import math
import os
from bisect import bisect_right
from collections.abc import Callable

import torch

from tidar_core.config import ConfigError, EngineConfig, ModelConfig
from tidar_core.engine.draft_policy import FULL_ROWS
from tidar_core.engine.step_cost import StepCost
from tidar_core.memory import GIB, free_memory
from tidar_core.model.float8 import FLOAT8
from tidar_core.model.rope import is_long

CPU_CACHE_SHARE = 0.2  # of the memory that a CPU's programs leave
# As much is enough for most. More, for so many whole sequences, an engine takes by its share of the processors: others
# may start beside it, and none knows of the others.
CPU_CACHE_ENOUGH, CPU_CACHE_SEQUENCES = 2 * GIB, 4
PROMPT_SECONDS = 2.0  # of a step on a CPU, that reading prompts takes
FULL_SECONDS = 20.0  # of a step on a CPU; one that takes minutes is taken for one that hangs
GPU_CACHE_SHARE = 0.85  # of the memory that is free once the weights are loaded, at most
GPU_CACHE_LEAST = 0.5  # of that, whatever else wants memory: without pages nothing is served, without graphs slower


def room_for(
    config: EngineConfig,
    model: ModelConfig,
    kv_dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
    beside: int = 0,
) -> tuple[int, int]:
    """Positions that a request may use, and pages for keys and values. beside: bytes of a GPU's memory that steps and
    their graphs want."""
    if config.max_model_len > model.max_positions:
        report(f"the model has {model.max_positions} positions: max_model_len {config.max_model_len} gives it no more")
    if model.stretches_to is not None and not is_long(model):
        report(
            f"requests are limited to {model.max_positions} positions: where max_model_len asks for more, up to "
            f"{model.stretches_to}, all are computed by the model's frequencies for long texts"
        )
    positions = min(model.max_positions, config.max_model_len or model.max_positions)
    pages = _cache_pages(config, model, kv_dtype, device, positions, beside)
    if pages * config.page_size < positions:
        positions = pages * config.page_size
        report(f"memory for K/V limits requests to {positions} positions")
    return positions, pages


def full_rows_for(model: ModelConfig, block: int, dtype: torch.dtype, device: torch.device, cost: StepCost) -> int:
    """Most rows per step for all fully drafting sequences together, but at least one sequence's: on a CPU what it
    computes in `FULL_SECONDS`, on a GPU what half of the memory that is free now is estimated to hold."""
    if not block:
        return FULL_ROWS
    one = block + block * block
    if device.type != "cuda":
        counts = range(2, FULL_ROWS // one + 1)
        return one * (1 + bisect_right(counts, FULL_SECONDS, key=lambda count: cost.full_seconds(block, count)))
    activations = row_bytes(model, dtype.itemsize)
    # Of a sequence: its verify rows and one proposal's slots, in fp32 and with a copy.
    scores = 2 * torch.float32.itemsize * model.vocab_size * (2 * block - 1) / one
    torch.cuda.empty_cache()  # what warm-up has left is used again
    free = torch.cuda.mem_get_info(device)[0]
    return max(one, min(FULL_ROWS, int(free / 2 / (activations + scores))))


def prompt_seconds_for(device: torch.device) -> float:
    """Seconds of a step that reading prompts may take. On a GPU without limit: there its rows are soon over, and what
    they cost behind a long context is not known well enough."""
    return math.inf if device.type == "cuda" else PROMPT_SECONDS


def row_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes that a layer computes with for each row, by estimate: what stays of one layer goes to the next."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    return itemsize * (4 * model.hidden_size + qkv + 3 * model.intermediate_size)


def _cache_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int, beside: int
) -> int:
    """Pages to hold, at least one; no more than all sequences at their longest could use. Raises ConfigError where
    there is no memory for one, or for those that are asked for."""
    most = -(-positions // config.page_size) * config.max_running
    head_bytes = model.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FLOAT8 else 0)
    page_bytes = 2 * model.layers * model.kv_heads * config.page_size * head_bytes
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        room = max(min(GPU_CACHE_SHARE * free, free - beside), GPU_CACHE_LEAST * free)
    else:
        free = free_memory()
        share, own = CPU_CACHE_SHARE * free, min(1.0, torch.get_num_threads() / (os.cpu_count() or 1))
        a_sequence = -(-positions // config.page_size) * page_bytes
        room = max(min(share, CPU_CACHE_ENOUGH), min(own * share, CPU_CACHE_SEQUENCES * a_sequence))
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
