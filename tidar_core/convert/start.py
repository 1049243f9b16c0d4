"""What training begins from: a new drafter, or an adapter to go on from; checked before anything takes long."""

from pathlib import Path

import torch

from tidar_core.config import ConfigError
from tidar_core.convert.drafter import (
    check_layers,
    check_rank,
    fingerprint_of,
    kept_of,
    new_drafter,
    with_slot_head,
)
from tidar_core.convert.options import ConvertOptions, Screen
from tidar_core.convert.trainer import check_rows
from tidar_core.model.adapter import (
    check_trainable,
    default_adapter_for,
    load_trained,
    may_have_default,
)
from tidar_core.model.adapter_config import BaseIdentity, read_adapter_config
from tidar_core.model.weights import AdapterWeights, ModelWeights


def check_start(options: ConvertOptions, identity: BaseIdentity) -> None:
    """Raises ConfigError for whatever does not fit about the drafter, before hours go into gathering data.

    identity: without a fingerprint as long as the weights are not read. `--start default` is then let pass where a
    shipped drafter may turn out to be for these weights, whatever the base is called.
    """
    check_rows(options.train)
    layers = check_layers(identity, options.layers)
    by_weights = options.start == "default" and not identity.fingerprint and default_adapter_for(identity) is None
    if by_weights and may_have_default(identity):
        return
    path, projections = _start_path(options, identity), options.projections or identity.projections
    if path is None:
        check_rank(identity, options.rank, projections)
        return
    known, train = read_adapter_config(path), options.train
    for name, theirs, ours in (
        ("--block-length", known.block_length, train.block),
        ("--within-block", known.within_block, train.within_block),
    ):
        if theirs != ours:
            raise ConfigError(f"the adapter {path.name} was trained with {name} {theirs}: go on with that")
    check_trainable(known, path)
    if not any(known.adapts(layer, projection) for layer in layers for projection in projections):
        raise ConfigError(f"the adapter {path.name} adapts nothing of what --projections and --layers name")


def _start_path(options: ConvertOptions, identity: BaseIdentity) -> Path | None:
    """Where the adapter lies that training begins from; None for a new one."""
    if options.start == "none":
        return None
    path = default_adapter_for(identity) if options.start == "default" else Path(options.start)
    if path is None:
        raise ConfigError(f"no drafter is shipped for {identity.name}: leave --start out")
    return path


def begin(
    options: ConvertOptions, identity: BaseIdentity, weights: ModelWeights, screen: Screen
) -> tuple[AdapterWeights, str]:
    """A new drafter, or the adapter to go on from, in fp32; and the name by which checkpoints know which it was (see
    `Origin.start`). Raises ConfigError where it does not fit."""
    check_start(options, identity)
    path, train, known_by = _start_path(options, identity), options.train, "none"
    projections = options.projections or identity.projections
    if path is None:
        begun = new_drafter(
            identity, weights.embedding, options.rank, projections, train.block, train.seed, options.layers
        )
    else:
        begun = load_trained(path, identity, torch.float32, weights.embedding.device, screen.line)
        # An adapter in --out changes with each run, so that its fingerprint would be another at each start.
        known_by = "--out" if path.resolve() == options.out.resolve() else fingerprint_of(begun)
        begun = kept_of(begun, projections, options.layers)
    if begun.slot_head is None:
        begun = with_slot_head(begun, weights.embedding, train.slot_head, train.seed)
    return begun, known_by
