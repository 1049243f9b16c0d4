"""The trainer beside a plain loop, in turn, on the default model: mask rows a second.

The plain loop is what one writes first: autograd through ordinary operations, attention by torch's own with a dense
mask for each document, the loss over the whole vocabulary at once, 24 anchors in each of 4 documents a step.

For example: python -m tests.tidar_core.convert.trainer_speed drafter.work/data (the token shards of a conversion)
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import DEFAULT_MODEL
from tidar_core.convert.blocks import Blocks, Pack, draw_blocks, pack_documents
from tidar_core.convert.drafter import new_drafter, trainable, with_slot_head
from tidar_core.convert.forward import PLAIN, Clean, FrozenBase, frozen_base, run_clean
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus, open_store, read_header
from tidar_core.convert.speed import fast_dtype
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, TrainingData, Watch, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.kernels.reference import REFERENCE_OPS, rotate_qkv, split_heads
from tidar_core.model.adapter import identify_base
from tidar_core.model.configuration import load_config
from tidar_core.model.decoder import run_layers
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import AdapterWeights, map_tensors, named_tensors

BLOCK, ANCHORS, DOCUMENTS = 8, 24, 4


def plain_attention(base: FrozenBase, pack: Pack, clean: Clean, blocks: Blocks) -> Callable[[int, Tensor], Tensor]:
    config = base.config
    places = torch.from_numpy(blocks.document).repeat_interleave(BLOCK)
    context = torch.from_numpy(blocks.context).repeat_interleave(BLOCK)
    number = torch.arange(len(blocks)).repeat_interleave(BLOCK)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        rotated = rotate_qkv(qkv, blocks.positions, base.rotary, config.kv_heads, None)
        q, k, v = (each.transpose(0, 1) for each in split_heads(rotated, config.kv_heads, config.head_dim))
        parts = []
        for document, (start, length) in enumerate(pack.spans):
            mine = (places == document).nonzero().squeeze(1)
            if not len(mine):
                continue
            keys = torch.cat((clean.kv.keys[layer][:, start : start + length], k[:, mine]), dim=1)
            values = torch.cat((clean.kv.values[layer][:, start : start + length], v[:, mine]), dim=1)
            seen = torch.cat(
                (torch.arange(length) < context[mine][:, None], number[mine][:, None] == number[mine]), dim=1
            )
            out = F.scaled_dot_product_attention(q[None, :, mine], keys[None], values[None], seen, enable_gqa=True)
            parts.append(out[0].transpose(0, 1).reshape(len(mine), -1))
        return torch.cat(parts)

    return attention


class PlainLoop:
    """The loop's state: drafter and optimizer."""

    def __init__(self, base: FrozenBase, start: AdapterWeights, corpus: Corpus, sampler: Sampler):
        # The trainer's own operations would make its clean pass faster, too.
        self.base, self.corpus, self.sampler = replace(base, ops=REFERENCE_OPS, attends=PLAIN), corpus, sampler
        self.adapter = trainable(start)
        self.tensors = [tensor for _, tensor in named_tensors(self.adapter)]
        self.optimizer = torch.optim.AdamW(self.tensors, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.draw = np.random.default_rng(0)

    def step(self) -> int:
        """One optimizer step; its mask rows."""
        base = self.base
        chosen = self.draw.choice(len(self.corpus.keys), DOCUMENTS, replace=False)
        pack = pack_documents([self.corpus.document(int(index)) for index in chosen], base.device)
        blocks = draw_blocks(pack, ANCHORS, BLOCK, base.config.max_positions, self.draw)
        clean = run_clean(base, pack)
        drafter = map_tensors(self.adapter, lambda tensor: tensor.to(base.dtype))
        x = drafter.slot_embeddings.expand(len(blocks), -1, -1).reshape(-1, base.config.hidden_size)
        attention = plain_attention(base, pack, clean, blocks)
        hidden = run_layers(REFERENCE_OPS, base.config, base.weights, drafter, x, 0, attention)
        target = F.linear(clean.hidden[blocks.target_rows.flatten()], base.weights.head).float().softmax(-1)
        drafted = F.linear(hidden, base.weights.head).float().log_softmax(-1)
        distance = F.kl_div(drafted, target, reduction="none").sum(-1).view(-1, BLOCK)
        slots = torch.cat((torch.tensor([0.3]), torch.exp(-torch.arange(BLOCK - 1) / 4)))
        loss = (distance * slots * blocks.trained).sum() / (len(blocks) * slots.sum())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return len(blocks) * BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    chosen = parser.parse_args()
    corpus = open_store(chosen.data, read_header(chosen.data)).read().corpus
    source = find_model(DEFAULT_MODEL)
    config = load_config(source)
    # Where a processor is slow in bf16 nobody would write the loop in it, and conversions train in fp32.
    weights = load_weights(source, config, fast_dtype(torch.device("cpu"), torch.bfloat16), "cpu")
    base = frozen_base(config, weights)
    identity = identify_base(source.name, config, weights, load_tokenizer(source))
    start = new_drafter(identity, weights.embedding, 32, identity.projections, BLOCK, 0)
    anchors = anchor_counts(corpus, range(len(corpus)), BLOCK, config.max_positions)
    sampler = Sampler(corpus.document, anchors, config.max_positions, 0)
    plain = PlainLoop(base, start, corpus, sampler)
    plain.step()
    speeds: dict[str, list[float]] = {"plain": [], "trainer": []}
    for number in range(chosen.rounds):
        began = time.monotonic()
        rows = sum(plain.step() for _ in range(chosen.steps))
        speeds["plain"].append(rows / (time.monotonic() - began))
        speeds["trainer"].append(trained(base, start, corpus, sampler, chosen.steps))
        print(f"round {number + 1}: " + ", ".join(f"{name} {found[-1]:.0f}" for name, found in speeds.items()))
    ratio = median(ours / theirs for ours, theirs in zip(speeds["trainer"], speeds["plain"], strict=True))
    print(f"mask rows a second: {median(speeds['trainer']):.0f}, {ratio:.2f} times the plain loop's")


def trained(base: FrozenBase, start: AdapterWeights, corpus: Corpus, sampler: Sampler, steps: int) -> float:
    """Mask rows a second of the trainer's own steps, the slot head among what it trains."""
    config = TrainConfig(measure_every=10**9)
    reports: list[StepReport] = []
    windows = choose_windows(corpus, [0], BLOCK, base.config.max_positions)
    data = TrainingData(sampler, Vocabulary(corpus, base.weights.head, config.vocabulary), windows)
    with tempfile.TemporaryDirectory() as scratch:
        train_drafter(
            base, with_slot_head(start, base.weights.embedding, config.slot_head, 0), data, config,
            Budget(steps=steps + 1), Path(scratch), Watch(step=reports.append),
        )  # fmt: skip
    return sum(report.mask_rows for report in reports[1:]) / sum(report.seconds for report in reports[1:])


if __name__ == "__main__":
    main()
