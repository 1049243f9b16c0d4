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

WAVE_SECONDS = 20.0  # what is generated is on disk a minute later at most (`own_words.FLUSH_SECONDS`)


@dataclass(frozen=True, slots=True)
class Completion:
    """What one submission gave: its tokens (the stop token among them), whether it ended by itself, and the stop
    string that ended it, if one did."""

    key: int
    tokens: tuple[int, ...]
    ended: bool
    stop: str | None = None


class TextSource(Protocol):
    """Completes prompts. capacity: how many it works on at once. emitted: tokens of all submissions so far, including
    those that an earlier run had made."""

    capacity: int
    emitted: int

    @property
    def in_flight(self) -> int:
        """How many completions were submitted and are not complete."""
        ...

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams, so_far: tuple[int, ...] = ()) -> bool:
        """Queues one completion, of which an earlier run made `so_far`; False where it does not fit the model."""
        ...

    def so_far(self, key: int) -> tuple[int, ...]:
        """What there is so far of a completion in flight."""
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

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams, so_far: tuple[int, ...] = ()) -> bool:
        try:
            self.engine.submit(Request(str(key), prompt, params, emitted=so_far))
        except RequestError:
            return False
        self._tokens[key] = list(so_far)
        self.emitted += len(so_far)
        return True

    def so_far(self, key: int) -> tuple[int, ...]:
        return tuple(self._tokens[key])

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


@dataclass(frozen=True, slots=True)
class _Submission:
    """A completion on its way; so_far: its tokens from earlier waves or an earlier run."""

    key: int
    prompt: tuple[int, ...]
    params: SamplingParams
    so_far: tuple[int, ...]

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - len(self.so_far)

    def rule(self) -> SamplingParams:
        """What the submissions of one wave must have in common: all but the seed."""
        return replace(self.params, seed=0, max_tokens=self.remaining)


class TransformersSource:
    """transformers' `generate`, a wave of prompts at a time. It needs nothing but the checkpoint, and is slower than
    the engine: a wave lasts as long as its longest answer. After `WAVE_SECONDS` it ends, and what is incomplete goes on
    in another. The checkpoint's own settings for generation (a penalty, say) are dropped: the text is to be what the
    weights say."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerFast, eos_ids: tuple[int, ...], capacity: int, longest: int
    ):
        self.model = model
        self.model.generation_config = GenerationConfig()  # where `generate` looks for all that it is not given
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.emitted = 0
        self._eos_ids = eos_ids
        self._longest = longest
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._waiting: deque[_Submission] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, key: int, prompt: tuple[int, ...], params: SamplingParams, so_far: tuple[int, ...] = ()) -> bool:
        if not prompt or len(prompt) + params.max_tokens > self._longest or max(prompt) >= self._vocab_size:
            return False
        self._waiting.append(_Submission(key, prompt, params, so_far))
        self.emitted += len(so_far)
        return True

    def so_far(self, key: int) -> tuple[int, ...]:
        return next(each.so_far for each in self._waiting if each.key == key)

    def step(self) -> list[Completion]:
        if not self._waiting:
            return []
        rule = self._waiting[0].rule()
        alike = [each for each in self._waiting if each.rule() == rule][: self.capacity]
        chosen = {each.key for each in alike}
        self._waiting = deque(each for each in self._waiting if each.key not in chosen)
        return self._wave(alike, rule)

    @torch.inference_mode()
    def _wave(self, wave: list[_Submission], rule: SamplingParams) -> list[Completion]:
        texts = [each.prompt + each.so_far for each in wave]
        width = max(len(text) for text in texts)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.full((len(texts), width), pad)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, width - len(text) :], mask[row, width - len(text) :] = torch.tensor(text), 1
        stops = sorted(rule.stop_token_ids | set(self._eos_ids))
        device = next(self.model.parameters()).device
        sampling: dict[str, Any] = {"do_sample": False}
        if rule.temperature > 0:
            sampling = {
                "do_sample": True, "temperature": rule.temperature, "top_p": rule.top_p, "top_k": rule.top_k,
            }  # fmt: skip
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(wave[0].params.seed + len(wave[0].so_far))
            out = self.model.generate(
                ids.to(device), attention_mask=mask.to(device), max_new_tokens=rule.max_tokens,
                eos_token_id=stops or None, pad_token_id=pad, max_time=WAVE_SECONDS, **sampling,
            )  # fmt: skip
        return [
            complete
            for row, each in enumerate(wave)
            if (complete := self._complete(each, out[row, width:].tolist(), set(stops))) is not None
        ]

    def _complete(self, submission: _Submission, fresh: list[int], stops: set[int]) -> Completion | None:
        """One row of a wave: what lies behind its own stop is padding. None where it has to go on in another wave."""
        end = next((index for index, token in enumerate(fresh) if token in stops), None)
        fresh = fresh if end is None else fresh[: end + 1]
        self.emitted += len(fresh)
        tokens, params = (*submission.so_far, *fresh), submission.params
        text = self.tokenizer.decode(list(tokens)) if params.stop else ""
        stop = next((each for each in params.stop if each in text), None)
        ended = end is not None or stop is not None
        if not ended and len(tokens) < params.max_tokens:
            self._waiting.appendleft(replace(submission, so_far=tokens))
            return None
        return Completion(submission.key, tokens, ended, stop)
