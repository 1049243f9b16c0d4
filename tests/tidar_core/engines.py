"""Engines on tiny checkpoints, for tests that run the real thing."""

import random
from dataclasses import replace
from pathlib import Path

from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.config import Architecture, EngineConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.layout import WithinBlock


def tiny_engine(
    directory: Path,
    architecture: Architecture = "llama",
    within_block: WithinBlock = "bidirectional",
    rank: int = 16,
    **settings: object,
) -> Engine:
    """An engine on a tiny checkpoint with a random drafter of block length 4; of other ranks than multiples of 16 it is
    not packed."""
    model = tiny_checkpoint(directory / "model", architecture)
    adapter = tiny_adapter(directory / "adapter", model, rank=rank, within_block=within_block)
    config = EngineConfig(model=str(model), adapter=str(adapter), dtype="float32", device="cpu")
    return load_engine(replace(config, **settings))  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[tuple[int, ...]]:
    """Random tokens of the tiny checkpoints, 1 to `longest` a prompt."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, 512) for _ in range(draw.randint(1, longest))) for _ in range(count)]


def pages_are_accounted_for(engine: Engine) -> bool:
    """Whether every page is free, cached or held by a sequence that is here."""
    scheduler = engine._scheduler
    pool = scheduler.pool
    held = {page for s in [*scheduler.running, *scheduler.waiting] for page in s.pages}
    return len(held) == pool.owned and pool.free + pool.owned + pool.cached == engine.info.pages
