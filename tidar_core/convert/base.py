"""The base model of a conversion: where it lies, what it is, and its weights when they are needed."""

from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError, DTypeName, ModelConfig
from tidar_core.convert.options import Screen
from tidar_core.memory import GIB, free_memory_and_swap
from tidar_core.model.adapter import identify_base
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights, numbers_to_load
from tidar_core.model.sources import ModelSource
from tidar_core.model.tokenizer import load_tokenizer, with_all_ends
from tidar_core.model.weights import ModelWeights, all_tensors, widened
from tidar_core.transfer import enough_memory, give_back_memory


@dataclass(frozen=True, slots=True)
class Base:
    """The base model before its weights are read, and the device that it will compute on."""

    source: ModelSource
    config: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    device: torch.device


def read_base(source: ModelSource, device: torch.device) -> Base:
    """Reads configuration and tokenizer. Raises ConfigError where they cannot be read."""
    tokenizer = load_tokenizer(source)
    return Base(source, with_all_ends(load_config(source), source, tokenizer), tokenizer, device)


def load_base_weights(base: Base, dtype: DTypeName, screen: Screen) -> tuple[BaseIdentity, ModelWeights]:
    """Loads the weights in `dtype` onto the base's device. Raises ConfigError where they cannot be read, and where
    memory, and swap on a CPU, does not hold them: the system would end this process, or another, without a word."""
    name = base.source.name
    needed = sum(numbers_to_load(base.source, base.config)) * getattr(torch, dtype).itemsize
    give_back_memory(base.device)  # of what generated the documents
    free = free_memory_and_swap()
    if base.device.type == "cpu" and needed > free and not psutil.MACOS:  # which lends as much of its disk as is needed
        raise ConfigError(
            f"{name} takes {needed / GIB:.1f} GiB of memory in {dtype}, and {free / GIB:.1f} GiB are free: free some, "
            "or take a smaller model"
        )
    with enough_memory(f"it does not hold the weights of {name} in {dtype}"):
        weights = load_weights(base.source, base.config, getattr(torch, dtype), base.device, screen.loading)
    return identify_base(name, base.config, weights, base.tokenizer), weights


def in_fp32(base: Base, weights: ModelWeights) -> ModelWeights:
    """The same weights in fp32; the given ones are consumed. Raises ConfigError where memory and swap do not hold
    them."""
    more = sum(tensor.numel() * (torch.float32.itemsize - tensor.itemsize) for tensor in all_tensors(weights))
    free = free_memory_and_swap()
    if base.device.type == "cpu" and more > free and not psutil.MACOS:
        raise ConfigError(
            f"{base.source.name} in fp32 takes {more / GIB:.1f} GiB of memory more, and {free / GIB:.1f} GiB are "
            "free: free some, take a smaller model, or train on a machine that is fast in bfloat16"
        )
    return widened(weights, consumed=True)
