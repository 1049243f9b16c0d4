"""The room that an engine has: positions of its model, pages for K/V, and prefixes that are kept in them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tidar_core.engines import pages_are_accounted_for, prompts, tiny_engine
from tests.tidar_core.kernels.test_kernels import model_config
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import sampled_params
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import room, start
from tidar_core.engine.draft_policy import FULL_ROWS
from tidar_core.engine.step_cost import StepCost
from tidar_core.request import FinishReason, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def test_no_row_passes_the_models_limit(tmp_path):
    small = tiny_engine(tmp_path, max_model_len=40)
    prompt = prompts(1, longest=20)[0]
    for mode in ("off", "full"):
        (answer,) = answer_all(small, [prompt], [replace(GREEDY, max_tokens=40 - len(prompt), drafts=mode)])
        assert len(answer.tokens) == 40 - len(prompt)
        assert answer.finish.reason is FinishReason.LENGTH


def test_a_known_prefix_is_not_computed_again(tmp_path):
    engine = tiny_engine(tmp_path)
    prefix = tuple(range(100, 200)) * 2
    params = sampled_params(8, "full")

    def answer(tail: int, salt: str = "") -> tuple[list[int], int, int]:
        engine.submit(Request("r", (*prefix, tail), params, cache_salt=salt))
        tokens, rows, cached = [], 0, 0
        while engine.has_work:
            for output in engine.step():
                tokens += output.tokens
                cached += output.trace.cached
                if output.trace.step == 0:
                    rows = output.trace.verify_rows
            assert pages_are_accounted_for(engine)
        return tokens, rows, cached

    first = answer(5)
    assert first[1:] == (201, 0)
    again = answer(5)
    assert again == (first[0], 201 - 192, 192)
    assert answer(6)[1:] == (201 - 192, 192)
    assert answer(5, salt="another tenant") == first
    whole_pages = tuple(range(300, 300 + 32))
    engine.submit(Request("a", whole_pages, params))
    while engine.has_work:
        engine.step()
    engine.submit(Request("b", whole_pages, params))
    outputs = engine.step()
    assert outputs[0].trace.cached == 16  # one token at least is computed, so the last page is not taken
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("asked", "longest", "said"), [(0, 4096, ""), (40, 40, ""), (5000, 4096, "max_model_len 5000 gives it no more")]
)
@pytest.mark.parametrize("stretches_to", [None, 131_072])
def test_a_request_has_no_more_positions_than_the_model_and_than_was_asked_for(
    asked: int, longest: int, said: str, stretches_to: int | None
) -> None:
    lines: list[str] = []
    model = replace(model_config(), max_positions=4096, stretches_to=stretches_to)
    config, device = EngineConfig(max_model_len=asked), torch.device("cpu")
    positions, _ = room.room_for(config, model, torch.bfloat16, device, lines.append)
    assert positions == longest
    assert (said in lines[0]) if said else len(lines) == (stretches_to is not None)
    assert any("up to 131072, all are computed by the model's frequencies" in line for line in lines) == bool(
        stretches_to
    )


@pytest.mark.parametrize("tokens", [16, 32, 80])
def test_a_cache_smaller_than_the_warm_up_is_left_alone_and_serves(tmp_path, tokens):
    small = tiny_engine(tmp_path, cache_tokens=tokens)
    assert small.info.exact
    assert small.info.max_model_len == tokens
    assert small._runner.cache.keys.eq(0).all()
    (answer,) = answer_all(small, [(5, 6, 7)], [replace(GREEDY, max_tokens=tokens - 3, drafts="full")])
    assert len(answer.tokens) == tokens - 3


def test_more_tokens_than_memory_holds_are_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"values of 65536 tokens want .* GiB are free .* lower cache_tokens"):
        tiny_engine(tmp_path, cache_tokens=65536)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "longest", "free", "threads", "positions", "tokens"),
    [
        (30, 3, 8192, 200, 8, 8192, 93_200),  # the default model's head of 64 here: 2 GiB
        (36, 8, 40_960, 200, 8, 40_960, 163_840),  # as Qwen3-8B with heads of 64: four whole sequences
        (36, 8, 40_960, 24, 8, 40_960, 69_904),  # a fifth of what is free
        (36, 8, 40_960, 200, 1, 40_960, 72_816),  # and an eighth of that, where others are beside it
        (36, 8, 40_960, 64, 1, 29_120, 29_120),  # but enough for most
        (80, 8, 131_072, 200, 8, 131_072, 262_144),
    ],
)
def test_on_a_cpu_a_large_model_has_room_for_its_longest_texts(
    layers: int,
    kv_heads: int,
    longest: int,
    free: int,
    threads: int,
    positions: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: free << 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(room.os, "cpu_count", lambda: 8)
    model = replace(model_config(), layers=layers, kv_heads=kv_heads, head_dim=64, max_positions=longest)
    device = torch.device("cpu")
    found, pages = room.room_for(EngineConfig(), model, torch.bfloat16, device, lambda line: None)
    assert (found, pages * 16) == (positions, tokens)


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "heads", "kv_heads", "block", "free", "rows"),
    [
        (4096, 12_288, 36, 32, 8, 8, 18, FULL_ROWS),  # Qwen3-8B on an H200
        (5120, 25_600, 64, 64, 8, 8, 2.5, 2866),  # Qwen3-32B on an H100
        (4096, 12_288, 36, 32, 8, 16, 1.0, 2086),  # Qwen3-8B on 24 GB
        (5120, 25_600, 64, 64, 8, 16, 0.05, 272),  # one sequence's in any case
    ],
)
def test_full_drafting_takes_no_more_memory_than_is_left(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    block: int,
    free: float,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 0))
    shape = {"hidden_size": hidden, "intermediate_size": inner, "layers": layers, "heads": heads}
    model = replace(model_config(), **shape, kv_heads=kv_heads, head_dim=128, vocab_size=151_936)
    cost = StepCost((1, 64), (1e-6, 64e-6), (0.0, 0.0), (0.0, 0.0))
    assert room.full_rows_for(model, block, torch.bfloat16, torch.device("cuda"), cost) == rows


def test_on_a_cpu_alone_time_limits_how_much_of_prompts_a_step_reads(tmp_path):
    assert room.prompt_seconds_for(torch.device("cuda")) == math.inf
    assert tiny_engine(tmp_path)._scheduler.limits.prompt_seconds == room.PROMPT_SECONDS


@pytest.mark.parametrize(
    ("a_row", "sequences"),
    [(1e-6, FULL_ROWS // 72), (0.01, 27), (0.1, 2), (10.0, 1)],
    ids=["a fast CPU", "1.5 billion weights on two cores", "8 billion weights", "one sequence is let in anyway"],
)
def test_a_step_of_full_drafts_is_soon_over_on_a_cpu(a_row: float, sequences: int) -> None:
    cost = StepCost((1, 64), (a_row, 64 * a_row), (0.0, 0.0), (0.0, 0.0))
    found = room.full_rows_for(model_config(), 8, torch.bfloat16, torch.device("cpu"), cost)
    assert found == 72 * sequences


@pytest.mark.parametrize(
    ("free", "beside", "pages"),
    [
        (120.0, 1.5, 102.0),  # Qwen3-8B on an H200: 0.85 of what is free
        (6.5, 1.5, 5.0),  # on 24 GB: all that the graphs leave
        (2.0, 1.5, 1.0),  # half of it in any case
    ],
)
def test_on_a_gpu_pages_leave_room_for_graphs(
    free: float, beside: float, pages: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 0))
    model = replace(model_config(), layers=36, kv_heads=8, head_dim=128, max_positions=40_960)
    config, device = EngineConfig(max_running=256), torch.device("cuda")
    kept = int(beside * 2**30)
    _, found = room.room_for(config, model, torch.bfloat16, device, lambda line: None, kept)
    assert found * 16 * 36 * 8 * 128 * 2 * 2 / 2**30 == pytest.approx(pages, abs=0.01)


def test_steps_that_are_captured_want_memory_and_others_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def room_for(*given: Any) -> tuple[int, int]:
        kept.append(given[-1])
        return room.room_for(*given)

    monkeypatch.setattr(start, "room_for", room_for)
    tiny_engine(tmp_path)
    monkeypatch.setattr(start, "_captures", lambda config, ops, device: True)
    monkeypatch.setattr(start, "_graphs", lambda *given: None)
    small = tiny_engine(tmp_path, max_running=1)
    large = tiny_engine(tmp_path, max_running=64)
    assert kept[0] == 0
    scores = 2 * 63 * small.info.block_length * small.info.vocab_size * 4
    assert kept[2] - kept[1] > scores > 0  # and more graphs
    assert large.info.pages


def test_where_no_page_fits_the_engine_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="no memory is left for keys and values"):
        tiny_engine(tmp_path, cache_tokens=0)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("load_weights", "does not hold the weights of .*: take a smaller model, or a larger GPU"),
        ("_adapter", "does not hold the drafter beside .*: take a larger GPU, or --adapter none"),
        ("pack_adapter", "does not hold .* while it is packed: take a smaller model, or a larger GPU"),
    ],
)
def test_a_gpu_that_is_too_small_is_a_line(tmp_path, monkeypatch, stage, line):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(start, stage, full)
    with pytest.raises(ConfigError, match=line):
        tiny_engine(tmp_path)
