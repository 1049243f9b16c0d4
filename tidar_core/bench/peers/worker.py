"""One engine as a process: a line of JSON in for each round, a line out. Runs in the engine's own environment.

    python worker.py {tidar,vllm,transformers,llama.cpp} MODEL [--drafts off|auto|full] [--dtype D] [--context N]
        [--running N]

In: {"prompts": [text, …], "max_tokens": n, "honour_end": bool}. Out, once the model is loaded: {"device": name,
"notes": [what its user should know, …]}; then for each round {"tokens": n, "seconds": s}. Greedy throughout. Only this
project's engine reads --drafts and --dtype. Each engine takes a GPU where its build can use one. No prompt with its
answer is longer than `context` tokens, and no round has more than `running` prompts.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

Decode = Callable[[list[str], int, bool], int]
Choices = argparse.Namespace
SIDE_BY_SIDE = 0.4  # of a GPU's memory, for vLLM: it would take all of it, and others are there too


class Loaded(NamedTuple):
    """A loaded engine. decode(prompts, max_tokens, honour_end): answers the prompts, returns the number of tokens.
    device: what it computes on. notes: what its user should know."""

    decode: Decode
    device: str
    notes: Sequence[str] = ()


def device_name(kind: str) -> str:
    """The name of torch's device of a kind: "cuda" or "cpu"."""
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"


def tidar(model: str, context: int, chosen: Choices) -> Loaded:
    """This project's engine, with pages for `chosen.running` sequences of `context` positions and no prefix reuse."""
    from tidar_core.bench.drive import answer_all
    from tidar_core.config import EngineConfig
    from tidar_core.engine import keep_loaded, load_engine
    from tidar_core.request import SamplingParams

    config = EngineConfig(model=model, dtype=chosen.dtype, max_model_len=context)
    pages = chosen.running * -(-context // config.page_size)  # no more: other engines want their part of a GPU's memory
    most = max(config.max_running, chosen.running)
    notes: list[str] = []
    serving = replace(config, max_running=most, cache_tokens=pages * config.page_size)
    engine = load_engine(serving, notes.append, stage=lambda line: None)
    keep_loaded()  # as where it serves
    rounds = iter(range(1 << 30))

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, drafts=chosen.drafts, ignore_eos=not honour_end)
        ids = [tuple(engine.tokenizer(text)["input_ids"]) for text in prompts]
        # A salt of its own for each round: no prefix of an earlier one is reused.
        return sum(len(answer.tokens) for answer in answer_all(engine, ids, [params] * len(ids), str(next(rounds))))

    return Loaded(decode, device_name(engine.info.device), notes)


def vllm(model: str, context: int, chosen: Choices) -> Loaded:
    """vLLM in bf16 without prefix caching; on a GPU it gets a share of the memory, since others run beside it."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    share = {"gpu_memory_utilization": SIDE_BY_SIDE} if current_platform.is_cuda() else {}
    llm = LLM(
        model, dtype="bfloat16", max_model_len=context, max_num_seqs=max(64, chosen.running),
        enable_prefix_caching=False, **share,
    )  # fmt: skip

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not honour_end)
        return sum(len(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False))

    return Loaded(decode, current_platform.get_device_name())


def transformers(model: str, context: int, _: Choices) -> Loaded:
    """transformers' `generate` in bf16, all prompts of a round as one padded batch; with compiled steps on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    language_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    language_model.to(device)
    named = language_model.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [tokenizer.eos_token_id if named is None else named]
    # Of what its makers say no more than where it ends: a penalty would be other work, and another text.
    language_model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    steps = compiled_steps(language_model, context, CompileConfig(dynamic=False)) if device == "cuda" else plain_steps

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
        limits = {"max_new_tokens": max_tokens} | ({} if honour_end else {"min_new_tokens": max_tokens})
        answers = language_model.generate(**inputs, **limits, do_sample=False, **steps(len(prompts)))
        ended = torch.isin(answers[:, inputs["input_ids"].shape[1] :], torch.tensor(ends, device=device))
        # A token counts up to the first end of sequence, that one included; behind it there is padding.
        counted = (ended.cumsum(1) - ended.long()) == 0
        return int(counted.sum()) if honour_end else counted.numel()

    return Loaded(decode, device_name(device))


def plain_steps(_: int) -> dict[str, Any]:
    """What `generate` is given where it is to run as it does by itself."""
    return {}


def compiled_steps(language_model: Any, context: int, how: Any) -> Callable[[int], dict[str, Any]]:
    """What `generate` is given, by the number of prompts, to be as fast as it gets on a GPU: a cache of `context`
    positions, with which it compiles its steps as `how` (a CompileConfig) says.

    Prompts are read by plain torch and steps have the shape of the cache, so prompts of any length find compiled what
    the first of as many has compiled: no padding to some length is needed. The cache stays for all that follow, since
    graphs are captured for its addresses.
    """
    from transformers import StaticCache

    caches: dict[int, Any] = {}

    def given(batch: int) -> dict[str, Any]:
        if batch not in caches:
            caches[batch] = StaticCache(config=language_model.config, max_cache_len=context)
        caches[batch].reset()
        return {"past_key_values": caches[batch], "compile_config": how}

    return given


def llama_cpp(model: str, context: int, _: Choices) -> Loaded:
    """llama.cpp through its Python binding, one sequence at a time, in the GGUF file's own types."""
    from llama_cpp import Llama, llama_supports_gpu_offload

    llm = Llama(model, n_ctx=context, n_threads=os.cpu_count(), n_gpu_layers=-1, verbose=False)
    end = llm.token_eos()

    def never_end(_: Any, scores: Any) -> Any:
        scores[end] = float("-inf")
        return scores

    def answer(text: str, max_tokens: int, honour_end: bool) -> int:
        tokens = llm.tokenize(text.encode(), add_bos=False, special=True)
        processors = None if honour_end else [never_end]
        count = 0
        for token in llm.generate(tokens, temp=0.0, logits_processor=processors):
            count += 1
            if count == max_tokens or token == end:
                break
        return count

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        # The Python binding decodes one sequence at a time.
        return sum(answer(text, max_tokens, honour_end) for text in prompts)

    return Loaded(decode, "GPU" if llama_supports_gpu_offload() else f"{os.cpu_count()} CPU threads")


ENGINES = {"tidar": tidar, "vllm": vllm, "transformers": transformers, "llama.cpp": llama_cpp}


def main(words: Sequence[str] | None = None) -> None:
    """Loads the engine, warms it up with one short answer, then answers rounds until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--drafts", default="off")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--running", type=int, default=64)
    chosen = parser.parse_args(words)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print as they like; replies have a line of their own
    decode, device, notes = ENGINES[chosen.engine](chosen.model, chosen.context, chosen)
    decode(["def f(x):"], 8, False)
    print(json.dumps({"device": device, "notes": notes}), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = decode(asked["prompts"], asked["max_tokens"], asked["honour_end"])
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}), file=replies)


if __name__ == "__main__":
    main()
