"""Where generated text comes from: this project's engine, or transformers where only that runs.

Both take token ids and sampling parameters and give whole completions back, so that `conversations.py` knows neither.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tidar_core.config import ConfigError
from tidar_core.engine import Engine
from tidar_core.request import FinishReason, Request, RequestError, SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """What one submission gave: its tokens (the stop token among them), whether it ended by itself, and the stop
    string that ended it, if one did."""

    key: int
    tokens: tuple[int, ...]
    ended: bool
    stop: str | None = None


class TextSource(Protocol):
    """Completes prompts. `capacity` is how many it works on at once; `emitted` counts the tokens made so far."""

    capacity: int
    emitted: int

    @property
    def in_flight(self) -> int: ...

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams) -> bool:
        """Queues one completion; False where it does not fit the model."""
        ...

    def step(self) -> list[Completion]:
        """Does some work; gives what is complete."""
        ...


class EngineSource:
    """This project's engine: completions join and leave its batch between steps."""

    def __init__(self, engine: Engine, capacity: int):
        self.engine = engine
        self.capacity = capacity
        self.emitted = 0
        self._tokens: dict[int, list[int]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._tokens)

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams) -> bool:
        try:
            self.engine.submit(Request(str(key), prompt, params))
        except RequestError:
            return False
        self._tokens[key] = []
        return True

    def step(self) -> list[Completion]:
        complete = []
        for output in self.engine.step():
            key = int(output.request_id)
            self._tokens[key] += output.tokens
            self.emitted += len(output.tokens)
            if output.finish is None:
                continue
            if output.finish.reason is FinishReason.ERROR:
                raise ConfigError(f"the model cannot generate text: {output.finish.error}")
            stop = output.finish.stop
            tokens, ended = tuple(self._tokens.pop(key)), output.finish.reason is FinishReason.STOP
            complete.append(Completion(key, tokens, ended, stop if isinstance(stop, str) else None))
        return complete


class TransformersSource:
    """transformers' `generate`, a wave of prompts at a time. Slower than the engine: a wave lasts as long as its
    longest answer; needs nothing of ours but the checkpoint. The checkpoint's own settings for generation (a penalty,
    say) are dropped: the text is to be what the weights say."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerFast, eos_ids: tuple[int, ...], capacity: int, longest: int
    ):
        self.model = model
        self.model.generation_config = GenerationConfig()  # what `generate` is not told it takes from there
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.emitted = 0
        self._eos_ids = eos_ids
        self._longest = longest
        self._waiting: deque[tuple[int, tuple[int, ...], SamplingParams]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams) -> bool:
        if not prompt or len(prompt) + params.max_tokens > self._longest:
            return False
        self._waiting.append((key, prompt, params))
        return True

    def step(self) -> list[Completion]:
        if not self._waiting:
            return []
        first = self._waiting[0][2]
        alike = [item for item in self._waiting if _rule(item[2]) == _rule(first)][: self.capacity]
        chosen = {key for key, _, _ in alike}
        self._waiting = deque(item for item in self._waiting if item[0] not in chosen)
        return self._wave(alike)

    @torch.inference_mode()
    def _wave(self, items: list[tuple[int, tuple[int, ...], SamplingParams]]) -> list[Completion]:
        params, width = items[0][2], max(len(prompt) for _, prompt, _ in items)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.full((len(items), width), pad)
        mask = torch.zeros_like(ids)
        for row, (_, prompt, _) in enumerate(items):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        stops = sorted(params.stop_token_ids | set(self._eos_ids))
        device = next(self.model.parameters()).device
        sampling: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            sampling = {
                "do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
            }  # fmt: skip
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(params.seed)
            out = self.model.generate(
                ids.to(device), attention_mask=mask.to(device), max_new_tokens=params.max_tokens,
                eos_token_id=stops or None, pad_token_id=pad, **sampling,
            )  # fmt: skip
        return [
            self._completion(key, out[row, width:].tolist(), own, set(stops)) for row, (key, _, own) in enumerate(items)
        ]

    def _completion(self, key: int, tokens: list[int], params: SamplingParams, stops: set[int]) -> Completion:
        """One row of a wave: what lies behind its own stop is padding."""
        tokens = tokens[: params.max_tokens]
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        tokens = tokens if end is None else tokens[: end + 1]
        self.emitted += len(tokens)
        text = self.tokenizer.decode(tokens) if params.stop else ""
        stop = next((each for each in params.stop if each in text), None)
        return Completion(key, tuple(tokens), end is not None or stop is not None, stop)


def _rule(params: SamplingParams) -> SamplingParams:
    """What the prompts of one wave must have in common: all but the seed."""
    return replace(params, seed=0)
