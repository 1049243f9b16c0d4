"""One engine as a process: a line of JSON in for each round, a line out. Runs in the engine's own environment.

    python worker.py {tidar,vllm,transformers,llama.cpp} MODEL [--drafts off|auto|full] [--dtype D] [--context N]

In: {"prompts": [text, …], "max_tokens": n, "honour_end": bool}. Out, once the model is loaded: {"ready": true}; then
for each round {"tokens": n, "seconds": s}. Greedy throughout; drafts and dtype are choices of ours alone.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[list[str], int, bool], int]
Choices = argparse.Namespace


def tidar(model: str, context: int, chosen: Choices) -> Decode:
    from tidar_core.bench.drive import answer_all
    from tidar_core.config import EngineConfig
    from tidar_core.engine import load_engine
    from tidar_core.request import SamplingParams

    engine = load_engine(EngineConfig(model=model, dtype=chosen.dtype, max_model_len=context))
    rounds = iter(range(1 << 30))

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, drafts=chosen.drafts, ignore_eos=not honour_end)
        ids = [tuple(engine.tokenizer(text)["input_ids"]) for text in prompts]
        # A salt of its own for each round: no prefix of an earlier one is reused.
        return sum(len(answer.tokens) for answer in answer_all(engine, ids, [params] * len(ids), str(next(rounds))))

    return decode


def vllm(model: str, context: int, _: Choices) -> Decode:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=context, max_num_seqs=64, enable_prefix_caching=False)

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not honour_end)
        return sum(len(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False))

    return decode


def transformers(model: str, context: int, _: Choices) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    language_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    language_model.to(device)
    # On a GPU as fast as it gets: a cache of fixed size makes generate() compile the model and capture its steps.
    fixed = {"cache_implementation": "static", "max_cache_len": context} if device == "cuda" else {}

    def decode(prompts: list[str], max_tokens: int, honour_end: bool) -> int:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
        limits = {"max_new_tokens": max_tokens, "min_new_tokens": 1 if honour_end else max_tokens}
        answers = language_model.generate(**inputs, **limits, do_sample=False, **fixed)
        ends = answers[:, inputs["input_ids"].shape[1] :] == tokenizer.eos_token_id
        # A token counts up to the first end of sequence, that one included; behind it there is padding.
        counted = (ends.cumsum(1) - ends.long()) == 0
        return int(counted.sum()) if honour_end else counted.numel()

    return decode


def llama_cpp(model: str, context: int, _: Choices) -> Decode:
    from llama_cpp import Llama

    llm = Llama(model, n_ctx=context, n_threads=os.cpu_count(), verbose=False)
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

    return decode


ENGINES = {"tidar": tidar, "vllm": vllm, "transformers": transformers, "llama.cpp": llama_cpp}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--drafts", default="off")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    chosen = parser.parse_args(words)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print as they like; replies have a line of their own
    decode = ENGINES[chosen.engine](chosen.model, chosen.context, chosen)
    decode(["def f(x):"], 8, False)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = decode(asked["prompts"], asked["max_tokens"], asked["honour_end"])
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}), file=replies)


if __name__ == "__main__":
    main()
