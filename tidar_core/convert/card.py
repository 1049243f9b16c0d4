"""The folder that comes out: the adapter's two files and a model card written from what was measured."""

import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidar_core.config import ConfigError
from tidar_core.convert.blocks import BlockSizes
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.drafter import rank_of
from tidar_core.convert.files import cannot_write, keep_file
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.shards import KINDS, Corpus, Kind
from tidar_core.convert.trainer import TrainConfig
from tidar_core.model.adapter import WEIGHTS_FILE, Adapter, save_adapter
from tidar_core.model.adapter_config import CONFIG_FILE, PROJECTIONS, AdapterConfig, BaseIdentity, read_adapter_config
from tidar_core.model.sources import from_home, hub_id_of
from tidar_core.model.weights import AdapterWeights, map_tensors, named_tensors

KIND_NAMES: dict[Kind, str] = {
    "chat": "conversations that the model had with itself",
    "code": "code that the model continued",
    "text": "text that the model continued",
    "prompt": "given prompts, answered by the model",
    "file": "given text",
}
BLOCKS_SEEN: dict[BlockSizes, str] = {
    "whole": "all blocks had all slots",
    "mixed": "blocks had from 2 to all slots, as drawn for each step",
    "growing": "blocks grew from 2 slots to all in the first half of the training",
}
GIVEN: dict[Kind, str] = {"prompt": "prompts", "file": "texts"}  # kinds with tokens that the base did not generate


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """Documents by kind, and the tokens of them that there are to learn from."""

    documents: dict[Kind, int]
    own_tokens: int

    @property
    def of_all_kinds(self) -> int:
        return sum(self.documents.values())


@dataclass(frozen=True, slots=True)
class Made:
    """How a drafter was made, for its card. model: how the user called the base. trained, held_out: the documents.
    start: what training began from, as in `Origin`."""

    base: BaseIdentity
    model: str
    trained: DocumentCounts
    held_out: DocumentCounts
    config: TrainConfig
    device: str
    start: str


def made_from(base: BaseIdentity, model: str, corpus: Corpus, config: TrainConfig, device: str, start: str) -> Made:
    """The same with the documents of `corpus` counted."""
    learnt, held_out = counts_of(corpus)
    return Made(base, model, learnt, held_out, config, device, start)


def counts_of(corpus: Corpus) -> tuple[DocumentCounts, DocumentCounts]:
    """What there is to train on, and what is held out."""
    own = np.diff(np.cumsum(corpus.own, dtype=np.int64)[corpus.ends - 1], prepend=0)

    def counted(indices: np.ndarray) -> DocumentCounts:
        kinds = corpus.kinds[indices]
        return DocumentCounts(
            {kind: int((kinds == index).sum()) for index, kind in enumerate(KINDS)}, int(own[indices].sum())
        )

    learnt, held_out = corpus.split()
    return counted(learnt), counted(held_out)


def check_folder(out: Path) -> None:
    """Raises ConfigError where a drafter cannot be written to `out`, or would be among other things there."""
    try:
        there = out.exists()
        if out.is_symlink() and not there:
            raise ConfigError(f"{out} is a link to what is not there: mend it, or choose a new folder for --out")
        found = {path.name for path in out.iterdir() if path.suffix != ".part"} if there else set()
    except OSError as error:
        raise ConfigError(f"{out} cannot be used ({error.strerror}): choose a new folder for --out") from None
    if found and not found & {CONFIG_FILE, WEIGHTS_FILE}:
        raise ConfigError(f"{out} holds something else than a drafter: choose a new or empty folder for --out")


def write_folder(
    directory: Path, made: Made, weights: AdapterWeights, progress: Progress, result: HeldOutResult
) -> None:
    """adapter.json, adapter.safetensors (bf16) and README.md, over those that are there.

    Raises ConfigError on a full disk.
    """
    names = [name for name, _ in named_tensors(weights)]
    adapted = tuple(sorted({int(name.split(".")[1]) for name in names if name.endswith(".A")}))
    config = AdapterConfig(
        base=made.base,
        rank=rank_of(weights),
        projections=tuple(p for p in PROJECTIONS if any(f".{p}." in name for name in names)),
        layers=None if len(adapted) == made.base.layers else adapted,
        slot_head=0 if weights.slot_head is None else weights.slot_head.out.shape[1],
        block_length=made.config.block,
        within_block=made.config.within_block,
        holds=tuple(round(share, 3) for share in result.holds),
        training=_training_record(made, progress, result),
    )
    adapter = Adapter(config, map_tensors(weights, lambda tensor: tensor.to(torch.bfloat16)), directory.name)
    try:
        save_adapter(adapter, directory)
    except OSError as error:
        raise cannot_write(directory, error) from None
    keep_file(directory / "README.md", model_card(made, config, directory.name, progress, result).encode())


def kept_tokens_per_step(out: Path) -> float:
    """What was measured of the drafter in `out`; 0 where there is none."""
    try:
        record = read_adapter_config(out).training.get("held_out")
    except ConfigError:
        return 0.0
    found = record.get("tokens_per_step") if isinstance(record, dict) else None
    return float(found) if isinstance(found, int | float) and (out / WEIGHTS_FILE).exists() else 0.0


def trained_steps(out: Path) -> int | None:
    """Steps that the drafter in `out` was trained for; 0 where there is none, None where nothing says so, as of one
    that was made elsewhere."""
    if not (out / WEIGHTS_FILE).exists():
        return 0
    try:
        found = read_adapter_config(out).training.get("steps")
    except ConfigError:
        return None
    return found if isinstance(found, int) else None


def _training_record(made: Made, progress: Progress, result: HeldOutResult) -> dict[str, Any]:
    return {
        "data": {**asdict(made.trained), "held_out": asdict(made.held_out)},
        "steps": progress.step,
        "mask_rows": progress.rows,
        "minutes": round(progress.seconds / 60, 1),
        "device": made.device,
        "start": made.start,
        "settings": made.config.settings(),
        "held_out": {
            "documents": result.documents,
            "tokens_per_step": round(result.tokens_per_step, 3),
            "by_kind": {kind: round(value, 3) for kind, value in result.by_kind.items()},
            "slot_0": round(result.slot_0, 3),
            "all_right": [round(share, 3) for share in result.all_right],
        },
    }


def model_card(made: Made, adapter: AdapterConfig, name: str, progress: Progress, result: HeldOutResult) -> str:
    """The README of a published adapter: a front matter that model hubs read, and what was measured."""
    config, base = made.config, made.base
    documents, tokens = made.held_out.of_all_kinds, made.held_out.own_tokens
    data = [f"- {count:,} × {KIND_NAMES[kind]}" for kind, count in made.trained.documents.items() if count]
    kinds = [f"| {KIND_NAMES[kind]} | {value:.2f} |" for kind, value in result.by_kind.items()]
    slots = " ".join(f"{share:.3f}" for share in result.all_right)
    known = {"none": "", "--out": ", begun from what was here before"}
    begun = known.get(made.start, f", begun from an adapter ({made.start})")
    on_hub = hub_id_of(made.model)  # a hub takes no card that names a path
    # By the hub's name a folder of its cache is found anywhere; a GGUF file there is not.
    served = on_hub if on_hub and (from_home(made.model) / "config.json").is_file() else made.model
    inside = "both ways" if adapter.within_block == "bidirectional" else "only to earlier slots"
    return f"""---
{f"base_model: {on_hub}{chr(10)}" if on_hub else ""}library_name: tidar
tags:
- tidar
- speculative-decoding
- adapter
---

# A TiDAR drafter for {base.name}

With this adapter {base.name} drafts the tokens to come while it decides the next one, in the same forward pass. The
adapter acts on mask rows alone: every token is still decided by the base's own weights, so it changes how fast text
comes and never the text.

    {shlex.join(["tidar", "up", "--model", served, "--adapter", name])}

## Measured

{result.documents} held-out documents, greedy, full pre-drafting, block {adapter.block_length}:
**{result.tokens_per_step:.2f} tokens per step** (1.00 without drafts).

| documents | tokens per step |
|---|---|
{chr(10).join(kinds)}

Slot 0 says what the base says: {result.slot_0:.3f}. Slots 1 … {adapter.block_length - 1}, all right so far: {slots}.

## Made from

{chr(10).join(data)}

{made.trained.own_tokens:,} tokens to learn from. {documents:,} more documents, with {tokens:,} such
tokens, were held out.

{_whose(made)}

## Trained

- rank {adapter.rank} on {", ".join(adapter.projections)} of {_layers(adapter)}; one mask embedding for each of
  {adapter.block_length} slots, which see each other {inside}
- {BLOCKS_SEEN[config.block_sizes]}
- {_slot_head_line(adapter)}
- {progress.rows:,} mask rows in {progress.step:,} steps, {progress.seconds / 60:.1f} minutes on {made.device}{begun}
- loss {_loss_line(config)}; AdamW (0.9, 0.95), highest learning rate {config.learning_rate:g}, seed {config.seed}
- base weights {base.fingerprint}, tokenizer {base.tokenizer}; {datetime.now(UTC):%Y-%m-%d}
"""


def _whose(made: Made) -> str:
    """Who wrote what the drafter learnt from, and so whose terms apply."""
    given = [what for kind, what in GIVEN.items() if made.trained.documents[kind]]
    if not given:
        return (
            "Questions and answers are the base model's own, and its licence is what applies to them\n"
            "and to this adapter."
        )
    return (
        f"The given {' and '.join(given)} came from elsewhere and may have terms of their own;\n"
        "the base model said the rest, and its licence is what applies to that and to this adapter."
    )


def _layers(adapter: AdapterConfig) -> str:
    if adapter.layers is None:
        return "all layers"
    return f"layers {', '.join(map(str, adapter.layers))}"


def _slot_head_line(adapter: AdapterConfig) -> str:
    if not adapter.slot_head:
        return "no slot head: each slot guesses without knowing the others"
    return f"a slot head of width {adapter.slot_head}, which tells each slot what the one before it said"


def _loss_line(config: TrainConfig) -> str:
    loss = config.loss
    parts = [f"{loss.kl_share:g} KL"] if loss.kl_share else []
    parts += [f"{1 - loss.kl_share:g} total variation"] if loss.kl_share < 1 else []
    slots = f"exp(-(s - 1) / {loss.decay:g})" if loss.weighting == "decay" else "the chance that the slots before hold"
    return f"{' + '.join(parts)}, slot 0 weighed {loss.first_slot:g}, slot s by {slots}"
