"""Compiles every Triton kernel variant in use for sm_90 and prints what each takes, one JSON object a line.

Run by `test_triton_compiled.py`, in a process of its own: the interpreter must not be on.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context

import torch

from tests.tidar_core.kernels.launches import Variant, compile_variant, noted_launches, step_launches
from tidar_core.bench.reading import read_all
from tidar_core.bench.shapes import QWEN3_8B, SHAPES, SMOLLM2_135M
from tidar_core.config import Experts
from tidar_core.engine.batch import BatchSize, inputs_of
from tidar_core.kernels.reference import split_heads
from tidar_core.kernels.rules import all_zero
from tidar_core.kernels.succession import Carried
from tidar_core.kernels.triton_blocks import BlockAttentionSizes, BlockTiles, block_attention
from tidar_core.kernels.triton_gemm import WIDEST_RANK
from tidar_core.kernels.triton_ops import triton_ops
from tidar_core.kernels.triton_sampling import pick_kept, pick_listed, pick_whole
from tidar_core.kernels.triton_succession import carry, decide, renew
from tidar_core.kernels.triton_tiles import Gpu, measured_tiles
from tidar_core.model.float8 import FLOAT8
from tidar_core.model.mixtures import router_rows

BF16, FP32 = torch.bfloat16, torch.float32
TRAINED = [
    (9, 3, 64, 8, False), (9, 3, 64, 8, True), (9, 3, 64, 3, False), (12, 2, 128, 8, False), (32, 8, 128, 8, False),
    (28, 4, 128, 16, True), (32, 32, 64, 8, False),
]  # fmt: skip
"""Heads, K/V heads and head size of models whose drafters are trained, slots of a block, causal within it or not."""
QWEN3_30B_A3B = Experts(128, 8, 768, ())
QWEN15_MOE = Experts(60, 4, 1408, (), renormalised=False, shared_inner=5632, shared_gated=True)
GLM45_AIR = Experts(128, 8, 1408, (), "sigmoid", biased=True, shared_inner=1408)
"""The experts of Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B and GLM-4.5-Air."""
ATTENTION = ("_attend_splits", "_merge", "_rotate_and_store", "_plan")


def attention_sizes() -> list[tuple[int, int, int, torch.dtype, int]]:
    """Heads, K/V heads, head size, dtype and page size beyond those of the measured shapes."""
    pages = [(9, 3, 64, BF16, page) for page in (32, 64)]
    groups = [(32, 32, 64, BF16, 16), (28, 4, 128, BF16, 16), (64, 8, 128, BF16, 64)]
    wide = [(8, 4, 256, BF16, 16), (16, 1, 256, BF16, 64), (8, 4, 256, FP32, 16), (12, 2, 128, FP32, 32)]
    return pages + groups + wide


def variants_in_use() -> list[Variant]:
    """Steps of every measured shape with an H100's tiles, of few rows and of many, with and without mask rows; with
    mask rows, which take more registers, also with the tiles of other GPUs, with weights and K/V in 8 bits, with the
    widest adapter, in fp32, and one operation at a time; other attention sizes; the experts of mixtures, each with
    every kind of launch and of weights once; the token rule; the bench's reading kernel."""
    launches, tiles = [], measured_tiles(Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132), BF16)
    for config in SHAPES.values():
        for verify, mask in ((8, 0), (8, 56), (80, 560)):
            launches += step_launches(config, BF16, 16, verify, mask, layers=2, measured=tiles)
        launches += step_launches(config, BF16, 16, 8, 56, layers=2)
        launches += step_launches(config, BF16, 16, 8, 56, layers=2, float8=True, kv_dtype=FLOAT8)
    launches += step_launches(QWEN3_8B, BF16, 16, 80, 0, layers=2, measured=tiles)
    launches += step_launches(QWEN3_8B, BF16, 16, 80, 560, layers=2)
    for mask in (56, 560):
        launches += step_launches(QWEN3_8B, BF16, 16, 8, mask, layers=2, rank=WIDEST_RANK, measured=tiles)
    launches += step_launches(QWEN3_8B, BF16, 16, 8, 56, layers=2, rank=WIDEST_RANK, float8=True, kv_dtype=FLOAT8)
    launches += step_launches(SMOLLM2_135M, FP32, 16, 8, 56, layers=2)
    launches += step_launches(SMOLLM2_135M, BF16, 16, 8, 56, layers=2, one_by_one=True)
    for heads, kv_heads, head_dim, dtype, page in attention_sizes():
        config = replace(QWEN3_8B, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden_size=512)
        steps = step_launches(config, dtype, page, 8, 0)
        launches += [launch for launch in steps if launch.variant.kernel.__name__ in ATTENTION]
    windowed = replace(QWEN3_8B, window=4096, windowed=(0,), activation="gelu_tanh", layers=1)
    for heads, kv_heads, head_dim in ((32, 8, 128), (4, 1, 256)):
        config = replace(windowed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden_size=512)
        steps = step_launches(config, BF16, 16, 8, 56)
        launches += [launch for launch in steps if launch.variant.kernel.__name__ in (*ATTENTION, "_gate_rows")]
    logits = torch.empty(8, 49152, dtype=FP32, device="meta")
    numbers = all_zero(8, torch.device("meta"))
    launches += noted_launches(lambda: pick_whole(logits, numbers))
    for scores in (logits, logits.bfloat16()):
        launches += noted_launches(partial(pick_kept, scores, numbers, 20))
    candidates = torch.empty(8, 32, dtype=torch.int64, device="meta")
    launches += noted_launches(lambda: pick_listed(logits[:, :32], candidates, numbers))
    for width in (0, 3, 7, 15):
        launches += noted_launches(partial(hand_on, width))
    launches += noted_launches(lambda: read_all(torch.empty(1 << 20, dtype=torch.int32, device="meta")))
    for heads, kv_heads, head_dim, slots, causal in TRAINED:
        launches += noted_launches(partial(train, BlockAttentionSizes(heads, kv_heads, head_dim, slots, causal)))
    for experts, dtype, rows, float8 in (
        (QWEN3_30B_A3B, BF16, 8, False),
        (QWEN3_30B_A3B, BF16, 9, False),
        (QWEN3_30B_A3B, BF16, 600, True),
        (QWEN3_30B_A3B, FP32, 2, False),
        (QWEN3_30B_A3B, FP32, 8, False),
        (QWEN15_MOE, BF16, 600, False),
        (QWEN15_MOE, BF16, 8, True),
    ):
        launches += noted_launches(partial(mix, experts, dtype, rows, float8))
    steps = noted_launches(partial(mix, GLM45_AIR, BF16, 8, False))
    launches += [launch for launch in steps if launch.variant.kernel.__name__ == "_choose"]
    return list(dict.fromkeys(launch.variant for launch in launches))


def mix(experts: Experts, dtype: torch.dtype, rows: int, float8: bool) -> None:
    """The experts of one layer."""
    device, hidden = torch.device("meta"), 2048
    ops = triton_ops(QWEN3_8B, dtype, device, measured={}, float8=float8)
    x, router = (torch.empty(count, hidden, dtype=dtype, device=device) for count in (rows, router_rows(experts)))
    bias = torch.empty(experts.count, device=device) if experts.biased else None
    gate_up, down = (
        ops.pack(torch.empty(experts.count, *size, dtype=dtype, device=device))
        for size in ((2 * experts.inner, hidden), (hidden, experts.inner))
    )
    ops.mix_experts(x, ops.route(x, router, bias, experts), gate_up, down, "silu")


def train(sizes: BlockAttentionSizes) -> None:
    """One layer's attention of the drafter's training, both ways."""
    clean, rows = (
        torch.empty(count, heads * sizes.head_dim, dtype=BF16, device="meta")
        for count, heads in ((1000, 2 * sizes.kv_heads), (90 * sizes.slots, sizes.heads + 2 * sizes.kv_heads))
    )
    _, k, v = split_heads(clean, sizes.kv_heads, sizes.head_dim)
    tiles = BlockTiles(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((50, 8), (90,))))
    out = block_attention(rows.requires_grad_(), k.transpose(0, 1), v.transpose(0, 1), tiles, sizes)
    out.sum().backward()  # type: ignore[no-untyped-call]


def hand_on(width: int) -> None:
    """From one step of four sequences to the next; two of them draft, if `width` drafts there may be."""
    size = BatchSize(8, 16, 9, 16)
    numbers = torch.empty(5 * 24 + 9 * 16 + 8 + 8 + 16 + 16, dtype=torch.int32, device="meta")
    inputs = inputs_of(numbers, size)
    state, source, nearest, table = (
        torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((5, 2 + width), (9,), (16,), (4, 8))
    )
    carry(inputs.rows, inputs.tokens, inputs.repeats, Carried(state, source, nearest), 16)
    truths, picks = (torch.empty(count, dtype=torch.int64, device="meta") for count in (8, 2 * width))
    renew(decide(truths, table, state, source, 2 * width, 2), table, picks)


VARIANTS = variants_in_use()


def compiled(index: int) -> str:
    return json.dumps(asdict(compile_variant(VARIANTS[index])))


if __name__ == "__main__":
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        for line in pool.map(compiled, range(len(VARIANTS))):
            print(line, flush=True)
