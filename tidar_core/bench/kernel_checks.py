"""Every Triton kernel against its oracle on fresh random inputs, and each row's bits among other rows.

The oracle is `tidar_core.kernels.reference` on the same inputs, widened: float64, or fp32 where the reference itself
computes in fp32. The error is max|Δ| / max|oracle|. Written for a GPU; runs interpreted as well, at toy size.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from tidar_core.bench.checking import (
    ALLOWED,
    Check,
    Sizes,
    each_or_failed,
    in_8_bits,
    numbers_of,
    random_cache,
    relative_error,
    some_rows,
    step_rows,
)
from tidar_core.bench.expert_checks import check_experts
from tidar_core.bench.layer_checks import check_layers
from tidar_core.bench.shapes import projections, random_weights
from tidar_core.config import Activation, ModelConfig
from tidar_core.convert.fused import block_error
from tidar_core.engine.batch import build_batch, inputs_of
from tidar_core.engine.flight import nearest_outcomes, plan_table
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels import reference
from tidar_core.kernels import rules as kernel_rules
from tidar_core.kernels.ops import KVCache, Ops, QKNorm, rotary_tables
from tidar_core.kernels.succession import Carried
from tidar_core.kernels.triton_blocks import BlockAttentionSizes, supports
from tidar_core.kernels.triton_ops import has_float8
from tidar_core.kernels.triton_sampling import pick_listed, pick_tokens
from tidar_core.layout import BlockForm, full_shape
from tidar_core.model.decoder import all_layers
from tidar_core.model.float8 import packed, rounded
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LowRank, ModelWeights, OwnAttention, widened
from tidar_core.request import Request, SamplingParams, page_numbers
from tidar_core.request import Sequence as EngineSequence
from tidar_core.sampling import picking
from tidar_core.sampling.token_rule import TokenRule
from tidar_core.transfer import on_device


def check_kernels(
    ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes | None = None
) -> Iterator[Check]:
    """All kernels of `ops` at a model's shape, on inputs drawn from torch's generators as they stand. What most models
    decode with comes first: on a GPU most of the time goes to compiling, and who has too little of it stops there."""
    chosen = sizes or Sizes()
    layers = {"layers": check_layers(config, dtype, device, chosen)} if ops.bind_layers is not None else {}
    groups = {
        **layers,
        "attention": _check_attention(ops, config, dtype, device, chosen),
        "picks": _check_picks(config, device),
        "succession": _check_succession(ops, config, device, chosen),
        "rows": _check_rows(ops, config, dtype, device),
        "products": _check_products(ops, config, dtype, device, chosen),
        "second view": _check_second_view(ops, config, dtype, device, chosen),
        "blocks": _check_blocks(config, dtype, device, chosen),
        "experts": check_experts(ops, config, dtype, device, chosen),
    }
    for kernels, checks in groups.items():
        yield from each_or_failed(kernels, dtype, checks)


def _check_rows(ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    def check(kernel: str, case: str, actual: Tensor, expected: Tensor) -> Check:
        return Check(kernel, case, str(dtype)[6:], relative_error(actual, expected), ALLOWED[dtype])

    x, residual = torch.randn(2, 7, config.hidden_size, dtype=dtype, device=device)
    weight = torch.rand(config.hidden_size, dtype=dtype, device=device)
    for before in (None, residual):
        wide = None if before is None else before.double()
        expected, total = reference.add_norm(x.double(), wide, weight.double(), config.norm_eps)
        normed, kept = ops.add_norm(x, None if before is None else before.clone(), weight, config.norm_eps)
        case = "7 rows" if before is None else "7 rows, residual"
        yield check("add_norm", case, normed, expected)
        yield check("add_norm", f"{case}, sum", kept, total)
    gate_up = torch.randn(7, 2 * config.intermediate_size, dtype=dtype, device=device)
    for activation in get_args(Activation):
        expected = reference.gate(gate_up.double(), activation)
        yield check("gate", f"{activation}, 7 rows", ops.gate(gate_up, activation), expected)


def _check_attention(
    ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Iterator[Check]:
    name = str(dtype)[6:]
    shape = full_shape(sizes.block, sizes.block - 1)
    rows, pages = step_rows(sizes.contexts, shape, sizes.page_size, device)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(len(rows.positions), width, dtype=dtype, device=device)
    cache = random_cache(config, 2, pages, sizes.page_size, dtype, device)
    rotary = rotary_tables(config, device)

    def attended(kernel: str, qkv: Tensor, kept: KVCache, meant: KVCache) -> Iterator[Check]:
        """Over pages `kept`, which stand for the fp32 numbers `meant`."""
        together, expected = ops.attend(qkv, rows, kept, 1), reference.attend(qkv.float(), rows, meant, 1)
        case = f"{len(qkv)} rows at contexts up to {max(sizes.contexts)}"
        yield Check(kernel, case, name, relative_error(together, expected), ALLOWED[dtype])
        alone = [rows.verify // 2, rows.verify - 1]  # the first and last thing that a step of one row can be
        same = all(
            torch.equal(ops.attend(qkv[r : r + 1], some_rows(rows, slice(r, r + 1)), kept, 1)[0], together[r])
            for r in alone
        )
        yield Check(kernel, "bits of a row alone", name, float(not same), 0.0)

    for normed in (False, True):
        q, k = torch.rand(2, config.head_dim, dtype=dtype, device=device) + 0.5
        wide_cache = KVCache(cache.keys.double(), cache.values.double())
        wide_norm = QKNorm(q.double(), k.double(), 1e-6) if normed else None
        expected = reference.rotate_and_store(qkv.double(), rows, rotary, wide_cache, 1, wide_norm)
        norm = QKNorm(q, k, 1e-6) if normed else None
        actual = ops.rotate_and_store(qkv.clone(), rows, rotary, cache, 1, norm)
        case = f"{len(qkv)} rows{', QK-norm' if normed else ''}"
        for part, got, wanted in (
            ("", actual, expected),
            (", keys", cache.keys, wide_cache.keys),
            (", values", cache.values, wide_cache.values),
        ):
            yield Check("rotate_and_store", case + part, name, relative_error(got, wanted), ALLOWED[dtype])
    yield from attended("attend", actual, cache, KVCache(cache.keys.float(), cache.values.float()))

    windows = (0, max(sizes.contexts) // 3)
    wide = KVCache(cache.keys.float(), cache.values.float(), windows=windows)
    yield from attended("attend, window", actual, replace(cache, windows=windows), wide)

    if not ops.float8_pages:
        return
    kept = in_8_bits(cache)
    actual = ops.rotate_and_store(qkv.clone(), rows, rotary, kept, 1, None)
    _, k, v = reference.split_heads(actual[: rows.verify], config.kv_heads, config.head_dim)
    page, offset = rows.write_slots // sizes.page_size, rows.write_slots % sizes.page_size
    meant = numbers_of(kept, dtype)
    same = torch.equal(meant.keys[1][page, :, :, offset], rounded(k))
    same = same and torch.equal(meant.values[1][page, :, offset], rounded(v))
    yield Check("rotate_and_store, 8 bits", "numbers in pages", name, float(not same), 0.0)
    yield from attended("attend, 8 bits", actual, kept, numbers_of(kept, torch.float32))


def _check_products(
    ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Iterator[Check]:
    name = str(dtype)[6:]
    for projection, (outs, ins) in projections(config).items():
        weight = torch.randn(outs, ins, dtype=dtype, device=device) * ins**-0.5
        bias = torch.randn(outs, dtype=dtype, device=device) if config.qkv_bias and projection == "qkv" else None
        low_rank = LowRank(
            torch.randn(sizes.rank, ins, dtype=dtype, device=device) * ins**-0.5,
            torch.randn(outs, sizes.rank, dtype=dtype, device=device) * sizes.rank**-0.5,
        )
        x = torch.randn(max(sizes.rows), ins, dtype=dtype, device=device)
        wide_bias = None if bias is None else bias.double()
        wide_low = LowRank(low_rank.a.double(), low_rank.b.double())
        drafts = len(x) // 3
        kinds = [("linear", weight, weight)]
        if dtype.itemsize == 2 and has_float8(device):  # 8-bit weights are multiplied by rows of 16 bits alone
            kinds.append(("linear, 8 bits", packed(weight), rounded(weight)))
        for kind, matrix, meant in kinds:
            expected = reference.linear(x.double(), meant.double(), wide_bias, wide_low, drafts)
            whole = ops.linear(x, matrix, bias, low_rank, drafts)
            yield Check(kind, f"{projection}, {len(x)} rows", name, relative_error(whole, expected), ALLOWED[dtype])
            same = torch.equal(ops.linear(x[:drafts], matrix, bias, None, drafts), whole[:drafts])
            for rows in sizes.rows:
                start = 7 * rows % (len(x) - rows + 1)
                first_mask = max(0, min(rows, drafts - start))
                part = ops.linear(x[start : start + rows].clone(), matrix, bias, low_rank, first_mask)
                same = same and torch.equal(part, whole[start : start + rows])
            yield Check(kind, f"{projection}, bits at {sizes.rows} rows", name, float(not same), 0.0)
    weight = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    x = torch.randn(3, config.hidden_size, dtype=dtype, device=device)
    logits = ops.head(x, weight)
    yield Check("head", "3 rows", name, relative_error(logits, x.double() @ weight.double().t()), ALLOWED[dtype])
    same = torch.equal(ops.head(x[1:2].clone(), weight), logits[1:2])
    yield Check("head", "bits of a row alone", name, float(not same), 0.0)


def _check_second_view(
    ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Iterator[Check]:
    """Layers where mask rows have attention projections of their own, as an engine runs them: the other rows are
    the base's, bit for bit, and mask rows say what a model with those projections would that reads the base's pages."""
    small = replace(config, layers=2, vocab_size=1, qkv_bias=False, o_bias=False)
    base, other = (random_weights(small, small.layers, dtype, device) for _ in range(2))
    own = tuple(OwnAttention(layer.qkv, layer.q_norm, layer.k_norm, layer.o) for layer in other.layers)
    adapter = AdapterWeights(other.embedding, (LayerAdapter(),) * small.layers, attention=own)
    second = tuple(
        replace(layer, qkv=its.qkv, q_norm=its.q_norm, k_norm=its.k_norm, o=its.o)
        for layer, its in zip(base.layers, own, strict=True)
    )
    shape = full_shape(sizes.block, sizes.block - 1)
    rows, pages = step_rows(sizes.contexts, shape, sizes.page_size, device)
    verify, mask = slice(rows.verify), slice(rows.verify, None)
    x = torch.randn(len(rows.positions), small.hidden_size, dtype=dtype, device=device)
    cache = random_cache(small, small.layers, pages, sizes.page_size, dtype, device)
    wide_cache, rotary = KVCache(cache.keys.double(), cache.values.double()), rotary_tables(small, device)

    def oracle(weights: ModelWeights, some: slice) -> Tensor:
        layers = all_layers(reference.REFERENCE_OPS, small, widened(weights, torch.float64), None, rotary)
        return layers(x[some].double(), some_rows(rows, some), wide_cache)

    verified = oracle(base, verify)
    drafted = oracle(replace(base, layers=second), mask)
    allowed = 4 * ALLOWED[dtype]  # two layers round some twenty times: plain torch in bf16 is 1.2e-2 off
    kept, alone = (KVCache(cache.keys.clone(), cache.values.clone()) for _ in range(2))
    found = all_layers(ops, small, base, adapter, rotary)(x.clone(), rows, kept)
    for case, actual, expected in (
        (f"{len(verified)} verify rows", found[verify], verified),
        (f"{len(drafted)} mask rows", found[mask], drafted),
        ("keys", kept.keys, wide_cache.keys),
        ("values", kept.values, wide_cache.values),
    ):
        yield Check("second view", case, str(dtype)[6:], relative_error(actual, expected), allowed)
    text = all_layers(ops, small, base, None, rotary)(x[verify].clone(), some_rows(rows, verify), alone)
    pairs = (text, found[verify]), (alone.keys, kept.keys), (alone.values, kept.values)
    same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    yield Check("second view", "bits of verify rows without drafts", str(dtype)[6:], float(not same), 0.0)


def _check_picks(config: ModelConfig, device: torch.device) -> Iterator[Check]:
    """Against the token rule in torch on the same device: equal tokens, greedy and sampled, of all and of a few."""
    logits = 3 * torch.randn(8, config.vocab_size, device=device)
    logits[0] = logits[0].round()  # ties
    heats = (0.0, 0.0, 0.7, 1.0, 1.0, 1.3, 2.0, 0.2)
    candidates = torch.rand(8, config.vocab_size, device=device).topk(32).indices
    whole = SamplingParams(max_tokens=1)
    kinds = {
        "argmax and Gumbel": whole,
        "top-p": replace(whole, top_p=0.9),
        "top-k and top-p": replace(whole, top_p=0.95, top_k=20),
        "min-p": replace(whole, min_p=0.05),
    }
    for kind, params in kinds.items():
        rules = [
            TokenRule(replace(params, temperature=heat, seed=int(row * 1e18)), 1000 * row)
            for row, heat in enumerate(heats)
        ]
        same = torch.equal(pick_tokens(logits, rules), picking.pick_tokens(logits, rules))
        yield Check("pick", f"{kind}, 8 rows", "float32", float(not same), 0.0)
        numbers, scores = kernel_rules.rule_numbers(rules, config.vocab_size, device), logits.gather(1, candidates)
        same = torch.equal(*(pick(scores, candidates, numbers) for pick in (pick_listed, kernel_rules.pick_listed)))
        yield Check("pick_listed", f"{kind}, 8 rows of 32", "float32", float(not same), 0.0)


def _check_succession(ops: Ops, config: ModelConfig, device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """From one step to the next against torch on the same device: equal numbers, with drafts in hand and proposals of
    all lengths."""
    block, count = sizes.block, 2 * sizes.block
    hands = [torch.randint(config.vocab_size, (number % block,)).tolist() for number in range(count)]
    states = [[1 + len(hand), 5, *hand, *[-1] * (block - 1 - len(hand))] for hand in hands]
    state = on_device([*states, [0] * len(states[0])], device, torch.int32)
    sources = torch.randperm(count).tolist()
    plans, truths = [], []
    for number, source in enumerate(sources):
        shape, pages = full_shape(block, 3 * number % block), [2 * number + 1, 2 * number + 2]
        sequence = EngineSequence(
            Request("bench", (1,), SamplingParams(max_tokens=1)), 0.0, [], pages=page_numbers(pages)
        )
        drafts = tuple(range(1, shape.drafts + 1))
        plans.append(SequencePlan(sequence, number % sizes.page_size, (0,), drafts, shape, emits=True))
        kept = torch.rand(block) < 0.8
        truths += (
            torch.tensor([*hands[source], *[7] * block][: len(drafts) + 1]).where(kept[: len(drafts) + 1], 7).tolist()
        )
    form = BlockForm(slot_0="anchor", labels="shifted")  # the one that has most to be carried on
    batch = build_batch(plans, sizes.page_size, lambda size: size, form)
    source = on_device([*sources, count], device, torch.int32)
    carried = Carried(state, source, nearest_outcomes(batch).to(device))
    table, true_tokens = plan_table(batch, len(truths)).to(device), on_device(truths, device)
    picks = torch.randint(-1, config.vocab_size, (count * (block - 1),), device=device)
    found = []
    for some in (reference.REFERENCE_OPS, ops):
        numbers = batch.numbers.to(device, copy=True)
        inputs = inputs_of(numbers, batch.size)
        some.carry(inputs.rows, inputs.tokens, inputs.repeats, carried, sizes.page_size)
        decided = some.decide(true_tokens, table, state, source[:count], len(picks), count)
        left = decided.state.clone()
        some.renew(decided, table, picks)
        tensors = decided.state, decided.came, decided.rows, decided.scores, decided.anchors
        found.append((numbers, left, *tensors))
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    yield Check("succession", f"{count} sequences", "int32", float(not same), 0.0)


def _check_blocks(config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """The trainer's attention of mask blocks, the greater error of its result and its gradient."""
    for causal in (False, True):
        blocks = BlockAttentionSizes(config.heads, config.kv_heads, config.head_dim, sizes.block, causal)
        if supports(blocks, dtype):
            case = f"{sizes.block} slots{', causal' if causal else ''}"
            yield Check("attend_blocks", case, str(dtype)[6:], block_error(blocks, dtype, device), ALLOWED[dtype])
