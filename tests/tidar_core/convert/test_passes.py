"""The trainer computes what the engine runs: mask rows, gradients, drafts that hold."""

import shutil
import warnings
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.convert.trained import TinyBase, corpus_of, random_documents, tiny_base
from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.config import Activation
from tidar_core.convert import flex, held_out
from tidar_core.convert.blocks import Blocks, anchor_places, draw_blocks, lay_blocks, pack_documents
from tidar_core.convert.drafter import trainable
from tidar_core.convert.flex import TILE, flex_clean_attention, flex_mask_attention, mask_rows_see, tiles
from tidar_core.convert.forward import PLAIN, Attends, Clean, FrozenBase, gpu_attends, run_clean, run_masks
from tidar_core.convert.held_out import (
    DOCUMENTS,
    HeldOut,
    choose_windows,
    documents_to_measure,
    judge_windows,
    measure_held_out,
)
from tidar_core.convert.ops import PLAIN_ROWS, compiled, training_ops
from tidar_core.engine.batch import build_batch
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.cpu_build import compiled_library
from tidar_core.kernels.cpu_training import row_ops
from tidar_core.kernels.ops import empty_cache, layer_windows
from tidar_core.kernels.reference import REFERENCE_OPS, rotate_qkv, split_heads
from tidar_core.layout import BlockForm, Shape
from tidar_core.model.decoder import all_layers, layer_qk_norm, run_layers
from tidar_core.model.weights import named_tensors
from tidar_core.request import Request, SamplingParams, Sequence, page_numbers

CPU = torch.device("cpu")
BY_KERNELS = [False, pytest.param(True, marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"))]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full")


# Anchors and blocks


@settings(deadline=None)
@given(count=st.integers(1, 5), block=st.integers(2, 6), seed=st.integers(0, 999), per_document=st.integers(1, 20))
def test_blocks_lie_behind_own_words(count, block, seed, per_document):
    documents = random_documents(count, seed)
    pack = pack_documents(documents, CPU)
    blocks = draw_blocks(pack, per_document, block, 50, np.random.default_rng(seed))
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in documents)])
    for row, (document, context) in enumerate(zip(blocks.document, blocks.context, strict=True)):
        tokens, own = documents[document]
        assert 1 <= context <= 50 - block
        assert own[context]
        assert own[context + 1]
        for slot in range(block):
            assert blocks.positions[row * block + slot] == context + slot
            inside = context + slot < len(tokens) and own[context : context + slot + 1].all()
            assert bool(blocks.trained[row, slot]) == inside
            if inside:
                assert blocks.target_rows[row, slot] == starts[document] + context + slot - 1
    pairs = list(zip(blocks.document.tolist(), blocks.context.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    for document, (_, own) in enumerate(documents):
        assert (blocks.document == document).sum() == min(per_document, len(anchor_places(own, block, 50)))


# Passes


def dense_mask_rows(base: FrozenBase, adapter, clean: Clean, blocks: Blocks, within_block: str) -> torch.Tensor:
    """Mask rows by one dense mask over all clean rows and all mask rows, in torch's own autograd."""
    config = base.config
    windows = layer_windows(config) or (0,) * config.layers
    starts = torch.tensor([clean.pack.spans[each][0] for each in blocks.document])[:, None]
    row = torch.arange(len(clean.pack.tokens))
    seen = (row >= starts) & (row < starts + torch.from_numpy(blocks.context)[:, None])
    block = torch.arange(len(blocks.positions)) // blocks.block
    own = block[:, None] == block
    own = own.tril() if within_block == "causal" else own

    def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        norms = layer_qk_norm(base.weights.layers[layer], config.norm_eps)
        rows = rotate_qkv(qkv, blocks.positions, base.rotary.of(layer), config.kv_heads, norms)
        q, k, v = (each.transpose(0, 1) for each in split_heads(rows, config.kv_heads, config.head_dim))
        keys, values = torch.cat((clean.kv.keys[layer], k), 1), torch.cat((clean.kv.values[layer], v), 1)
        nearest = starts[block] + blocks.positions[:, None] - (windows[layer] or 1 << 30)
        visible = torch.cat((seen[block] & (row > nearest), own), 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(len(qkv), -1)

    x = adapter.slot_embeddings[: blocks.block].repeat(len(blocks), 1)
    return run_layers(REFERENCE_OPS, config, base.weights, adapter, x, 0, attention)


@pytest.mark.parametrize("by_kernels", BY_KERNELS)
@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "smollm3", "olmo2", "gemma3_text", "cwm", "qwen2_moe"]
)
def test_mask_rows_and_gradients_are_those_of_a_dense_mask(tmp_path, architecture, within_block, by_kernels):
    tiny = tiny_base(tmp_path, architecture)
    base = tiny.base if by_kernels else replace(tiny.base, ops=training_ops(CPU, print), attends=PLAIN)
    pack = pack_documents(random_documents(3), CPU)
    blocks = draw_blocks(pack, 30, 4, 1024, np.random.default_rng(0))
    assert (np.bincount(blocks.document) > 16).any()  # more than one chunk of blocks
    clean = run_clean(base, pack)
    found = []
    for way in (run_masks, dense_mask_rows):
        adapter = trainable(replace(tiny.adapter, slot_head=None))
        hidden = way(base, adapter, clean, blocks, within_block)
        hidden.square().sum().backward()
        found.append((hidden.detach(), {name: tensor.grad for name, tensor in named_tensors(adapter)}))
    (ours, our_slopes), (theirs, their_slopes) = found
    if by_kernels:  # which sum a norm's squares in another order than the oracle: that parts them by millionths
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    for name, slope in their_slopes.items():
        torch.testing.assert_close(our_slopes[name], slope, rtol=1e-4, atol=1e-5 * slope.abs().max().item(), msg=name)


@pytest.mark.parametrize("architecture", ["qwen3", "smollm3", "olmo3"])
@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_flex_attention_is_the_same_attention(tmp_path, within_block, architecture):
    tiny = tiny_base(tmp_path, architecture)
    pack = pack_documents(random_documents(3, longest=200), CPU)
    assert max(length for _, length in pack.spans) > 64  # more than one chunk of rows
    blocks = draw_blocks(pack, 8, 3, 1024, np.random.default_rng(0))
    packed = Attends(flex_clean_attention, flex_mask_attention)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU, FlexAttention is its plain definition
        (a, b), (c, d) = (
            ((clean := run_clean(base, pack)).hidden, run_masks(base, tiny.adapter, clean, blocks, within_block))
            for base in (tiny.base, replace(tiny.base, attends=packed))
        )
    torch.testing.assert_close(a, c, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(b, d, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("attends", [PLAIN, Attends(flex_clean_attention, flex_mask_attention)])
def test_queries_of_clean_rows_are_not_kept(tmp_path, attends):
    base = replace(tiny_base(tmp_path).base, attends=attends)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        kv = run_clean(base, pack_documents(random_documents(3), CPU)).kv
    for keys, values in zip(kv.keys, kv.values, strict=True):
        assert keys.stride() == values.stride() == (base.config.head_dim, 2 * len(keys) * base.config.head_dim, 1)
        assert keys.untyped_storage().nbytes() == 2 * keys.numel() * keys.element_size()


def test_flex_attention_is_tried_with_the_models_own_heads(tmp_path, monkeypatch):
    tiny, lines, tried = tiny_base(tmp_path, "qwen3"), [], []

    def attend(q, k, v, **how):
        tried.append((q.shape[1], k.shape[1], v.shape[3], q.dtype))
        if len(tried) > 1:
            raise RuntimeError("out of shared memory")
        return q

    monkeypatch.setattr(flex, "_flex", lambda device: attend)
    config, embedding = tiny.base.config, tiny.base.weights.embedding
    assert [flex.flex_runs(config, embedding, lines.append) for _ in range(2)] == [True, False]
    assert tried == [(config.heads, config.kv_heads, config.head_dim, embedding.dtype)] * 2
    assert lines == ["training without FlexAttention, which is slower: RuntimeError"]


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_what_is_prepared_is_all_that_steps_ask_for(tmp_path, monkeypatch, within_block):
    """On a GPU each size of blocks has kernels of its own, which take long to compile."""
    pytest.importorskip("triton")
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("tidar_core.convert.fused.proven", lambda *sizes: asked.append(sizes) or False)
    tiny = tiny_base(tmp_path)
    base = replace(tiny.base, attends=gpu_attends())
    base.attends.prepare(base.config, base.weights, range(2, 5), within_block)
    prepared = asked.copy()
    pack = pack_documents(random_documents(3), CPU)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        for block in (2, 3, 4):
            blocks = draw_blocks(pack, 8, block, 1024, np.random.default_rng(0))
            run_masks(base, tiny.adapter, run_clean(base, pack), blocks, within_block)
    assert asked[3:] == prepared


def test_torch_compiles_nothing_anew_for_another_size_of_blocks(tmp_path, monkeypatch):
    graphs: list[object] = []

    def counted(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph.forward

    tiny, rotation, attention = tiny_base(tmp_path), flex._rotation("cpu"), flex._flex("cpu")
    ops = {name: getattr(REFERENCE_OPS, name) for name in ("add_norm", "gate")}
    seen = {name: torch.compile(op, dynamic=True, backend=counted) for name, op in ops.items()}
    for name, plain in (("_rotation", rotation), ("_flex", attention)):
        made = torch.compile(plain, dynamic=True, backend=counted)
        monkeypatch.setattr(flex, name, lambda device, made=made: made)
    attends = Attends(flex_clean_attention, flex_mask_attention)
    base = replace(tiny.base, ops=replace(tiny.base.ops, **seen), attends=attends)
    pack = pack_documents(random_documents(3), CPU)
    found: list[int] = []
    with torch.no_grad():  # which FlexAttention wants on a CPU
        for block in (4, 2, 3):
            blocks = draw_blocks(pack, 9, block, 1024, np.random.default_rng(0))
            run_masks(base, tiny.adapter, run_clean(base, pack), blocks, "bidirectional")
            found.append(len(graphs))
    assert found[0] > 0
    assert found == [found[0]] * 3


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 99), block=st.integers(2, 8), causal=st.booleans())
def test_flex_attentions_tiles_cover_what_is_seen(count, seed, block, causal):
    pack = pack_documents(random_documents(count, seed, longest=400), CPU)
    blocks = draw_blocks(pack, 40, block, 1024, np.random.default_rng(seed))
    keys = len(pack.tokens) + len(blocks.positions)
    seen = mask_rows_see(pack, blocks, "causal" if causal else "bidirectional")
    some, every = tiles(seen, keys)
    rows = len(blocks.positions)
    none = torch.zeros((), dtype=torch.int64)
    visible = seen.rule()(none, none, torch.arange(rows)[:, None], torch.arange(keys))
    for i in range(some.shape[0]):
        for j in range(some.shape[1]):
            part = visible[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert not part.any() or some[i, j]
            assert not every[i, j] or (part.all() and part.shape[1] == TILE)


@pytest.mark.parametrize("by_kernels", BY_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient_of", ["normed", "total", "both"])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_trainers_operations_are_the_references(by_kernels, dtype, gradient_of, activation):
    rows = row_ops(compiled_library("training"), dtype) if by_kernels else PLAIN_ROWS
    ops, draw = training_ops(CPU, print, rows), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    x, residual, weight, gate_up = random(9, 32), random(9, 32), random(32), random(9, 64)
    results = []
    for record in (ops, REFERENCE_OPS):
        inputs = [each.clone().requires_grad_(True) for each in (x, residual, gate_up)]
        normed, total = record.add_norm(inputs[0], inputs[1], weight, 1e-5)
        mixed = record.gate(inputs[2], activation)
        wanted = {"normed": normed, "total": total, "both": normed + total.sin()}[gradient_of]
        (wanted.float().cos().sum() + mixed.float().sin().sum()).backward()
        results.append([normed, total, mixed, *(each.grad for each in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=3e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2 if dtype is torch.bfloat16 else 1e-5
        )


def engine_mask_rows(tiny: TinyBase, tokens: list[int], drafts: int, within_block: str) -> dict[int, torch.Tensor]:
    """Hidden states of the mask rows of a step over `tokens` with the last `drafts` verified, by context end: the
    engine's own way from a plan over its batch and its pages."""
    base, page = tiny.base, 16
    pages = -(-len(tokens) // page) + 1
    cache = empty_cache(base.config, pages + 1, page, torch.float32, CPU)
    layers = all_layers(REFERENCE_OPS, base.config, base.weights, tiny.adapter, base.rotary)
    runner = Runner(REFERENCE_OPS, base.config, base.weights, tiny.adapter, cache, layers)
    sequence = Sequence(Request("r", tuple(tokens), GREEDY), 0.0, tokens, pages=page_numbers(range(1, pages + 1)))
    known = len(tokens) - drafts
    shape = Shape(drafts, tuple(range(1, drafts + 2)), 4)
    plan = SequencePlan(sequence, 0, tuple(tokens[:known]), tuple(tokens[known:]), shape, emits=True)
    hidden = runner.forward(build_batch([plan], page, runner.padded, BlockForm(within_block)))
    masks = hidden[-shape.mask_rows :].view(len(shape.proposals), shape.block, -1)
    return {plan.position + outcome: masks[index] for index, outcome in enumerate(shape.proposals)}


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_training_sees_what_the_engine_runs(tmp_path, within_block, architecture):
    tiny = tiny_base(tmp_path, architecture, within_block)
    tokens = random_documents(1, longest=50)[0][0].tolist()
    pack = pack_documents([(np.array(tokens), np.ones(len(tokens), bool))], CPU)
    expected = engine_mask_rows(tiny, tokens, 3, within_block)
    contexts = np.array(sorted(expected))
    assert contexts.tolist() == list(range(len(tokens) - 3, len(tokens) + 1))
    blocks = lay_blocks(pack, [contexts], 4)
    with torch.no_grad():
        hidden = run_masks(tiny.base, tiny.adapter, run_clean(tiny.base, pack), blocks, within_block)
    for ours, context in zip(hidden.view(len(contexts), 4, -1), contexts, strict=True):
        torch.testing.assert_close(ours, expected[context], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_held_out_drafts_hold_where_the_engines_do(tmp_path, within_block):
    engine = tiny_engine(tmp_path, within_block=within_block, rank=4)
    tiny = tiny_base(tmp_path, within_block=within_block)
    prompts = [tuple(tokens[:12].tolist()) for tokens, _ in random_documents(8)]
    answers = answer_all(engine, prompts, [GREEDY] * len(prompts))
    documents, windows = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = np.array([*prompt, *answer.tokens])
        documents.append((tokens, np.arange(len(tokens)) >= len(prompt)))
        windows.append(np.arange(len(prompt), len(tokens)))
    held_out = HeldOut(tuple(documents), tuple(windows), ("chat",) * len(documents))
    judged = judge_windows(tiny.base, tiny.adapter, held_out, 4, within_block)
    accepted = 0
    for answer, holds in zip(answers, judged, strict=True):
        place = 0
        for step in answer.steps[1:]:
            if len(step.drafted) < 3:  # cut short by the end of the answer
                break
            right = int(np.logical_and.accumulate(holds[place, 1:]).sum())
            assert step.accepted == right
            accepted += right
            place += right + 1
    assert accepted > 10
    result = measure_held_out(tiny.base, tiny.adapter, held_out, 4, within_block)
    assert result.documents == 8
    assert 1.0 < result.tokens_per_step < 4.0
    assert result.by_kind == {"chat": result.tokens_per_step}
    assert np.cumprod(result.holds) == pytest.approx(result.all_right)


def test_a_window_lies_in_one_stretch_of_own_words_and_its_document_holds_its_blocks():
    own = np.ones(200, bool)
    own[0] = own[60:70] = False
    found = choose_windows(corpus_of([(np.arange(3, 203, dtype=np.int32), own)]), [0], 4, 1024)
    assert found.windows[0].tolist() == list(range(1, 59))
    assert len(found.documents[0][0]) == len(found.documents[0][1]) == 58 + 4


def test_a_large_model_is_measured_on_fewer_documents_where_there_is_no_gpu():
    cpu = torch.device("cpu")
    assert documents_to_measure(cpu, 106_000_000) == documents_to_measure(torch.device("cuda"), 10**11) == DOCUMENTS
    assert DOCUMENTS > documents_to_measure(cpu, 400_000_000) > documents_to_measure(cpu, 7_000_000_000) > 1
    corpus = corpus_of(random_documents(20))
    found = choose_windows(corpus, range(20), 4, 1024, 5)
    assert len(found.documents) == len(found.windows) == len(found.kinds) == 5


def test_tokens_per_step_are_those_of_a_walk(monkeypatch):
    """What holds behind a draft that does not counts for nothing; a kind's documents are its own."""
    judged = [np.ones((6, 3), bool), np.tile([True, False, True], (6, 1))]
    monkeypatch.setattr(held_out, "judge_windows", lambda *_: judged)
    result = measure_held_out(None, None, HeldOut((), (), ("chat", "code")), 3, "causal")
    assert result.by_kind == {"chat": 3.0, "code": 1.0}
    assert result.tokens_per_step == (18 + 15) / (6 + 15)
    assert result.slot_0 == 1.0
    assert result.all_right == (0.5, 0.5)


def test_a_full_gpu_is_not_taken_for_a_broken_compiler(monkeypatch):
    """The trainer goes on with fewer rows, and without the compiler it would hold fewer still."""
    lines: list[str] = []
    failures = iter([torch.OutOfMemoryError("full"), None, RuntimeError("no compiler"), None])

    def through(function, dynamic):
        def run(*arguments):
            failure = next(failures)
            if failure is not None:
                raise failure
            return "compiled"

        return run

    monkeypatch.setattr(torch, "compile", through)
    run = compiled(lambda: "plain", lines.append)
    with pytest.raises(torch.OutOfMemoryError):
        run()
    assert run() == "compiled"
    assert lines == []
    assert run() == run() == "plain"
    assert lines == ["running without torch.compile, which is slower: RuntimeError"]
