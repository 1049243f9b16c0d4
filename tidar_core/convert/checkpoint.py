"""The trainer's memory on disk: two checkpoints, each one file that is whole or absent."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.convert.shards import write_atomically

KEPT = 2


@dataclass(slots=True)
class Progress:
    """Where a training is. step: optimizer steps taken. epoch, place: documents of the epoch's order that were used.
    documents: how many there were to order. seconds: spent on training. rows: mask rows trained.
    best: highest tokens per step on held-out documents; stale: measurements since then without a new one."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    documents: int = 0
    seconds: float = 0.0
    rows: int = 0
    best: float = 0.0
    stale: int = 0


def save_checkpoint(directory: Path, settings: dict[str, Any], progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint and removes all but the newest two. Raises ConfigError on a full disk."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = json.dumps({"settings": settings, "progress": asdict(progress)})
    write_atomically(_path(directory, progress.step), save(held, metadata={"about": about}))
    for old in _checkpoints(directory)[:-KEPT]:
        old.unlink(missing_ok=True)


def load_checkpoint(directory: Path, settings: dict[str, Any]) -> tuple[Progress, dict[str, Tensor], list[str]] | None:
    """The newest checkpoint that can be read, and lines worth telling; None where there is none.

    Raises ConfigError where it was made with other settings.
    """
    notes = []
    for path in reversed(_checkpoints(directory)):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            progress = Progress(**about["progress"])
            about["settings"].setdefault("slot_head", 0)  # not named before there was one
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            notes.append(f"{path.name} cannot be read: going on from the one before")
            path.unlink(missing_ok=True)
            continue
        differing = [name for name in settings if about["settings"].get(name) != settings[name]]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{directory} holds a training with {name.replace('_', ' ')} {about['settings'].get(name)}, not "
                f"{settings[name]}: go on with that, or choose another --out"
            )
        return progress, tensors, notes
    return None


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The moments of AdamW, by parameter name; names: of the parameters of all its groups, in order."""
    return {
        f"{key}/{name}": value
        for name, parameter in zip(names, _parameters(optimizer), strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave."""
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key}/{name}" in tensors:
                optimizer.state[parameter][key] = tensors[f"{key}/{name}"].to(parameter.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.safetensors"


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-[0-9]*.safetensors"))
