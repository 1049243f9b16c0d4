"""The trainer's memory on disk: two checkpoints, each one file that is whole or absent."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.convert.files import cannot_write, keep_file

KEPT = 2
PARAMETER = "parameter/"
LEAST_GAIN = 0.002  # of tokens per step, for a measurement to count as progress
SETTLED = 0.8  # of the budget: the learning rate has fallen below an eighth of its highest, and lack of gain counts


@dataclass(slots=True)
class Progress:
    """Where a training is. step: optimizer steps taken. epoch: times that all documents were gone through; place: how
    many of them were used since; documents: how many there are. seconds: spent on training. rows: mask rows trained.
    best: highest tokens per step on held-out documents; stale: measurements without gain since then. held_out: digest
    of those documents; empty before the first measurement, and in checkpoints of versions that did not keep it."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    documents: int = 0
    seconds: float = 0.0
    rows: int = 0
    best: float = 0.0
    stale: int = 0
    held_out: str = ""

    def compare_on(self, held_out: str) -> None:
        """To be called with the digest of the held-out documents when a run begins. Where it is another than before,
        earlier measurements do not compare and are forgotten. It is kept with the first measurement alone: a run that
        ended before that has left in the output folder what was measured on other documents."""
        if self.held_out not in ("", held_out):
            self.best, self.stale = 0.0, 0

    def knows(self, kept: float) -> None:
        """To be called when a run goes on: what lies in the output folder measured `kept` tokens per step, 0 where
        nothing does. It decides what is better, since a kill may have left it newer or older than the checkpoint."""
        self.best = kept

    def goes_on(self, used: float) -> None:
        """To be called when a run begins. used: the share of the budget that is used up. A training that had ended and
        was given a larger budget gets its patience back."""
        if used < SETTLED:
            self.stale = 0

    def take(self, found: float, held_out: str, counts: bool) -> None:
        """Takes note of a measurement on the documents with this digest. counts: whether one without gain brings the
        training's end nearer."""
        self.held_out = held_out
        self.stale = 0 if found > self.best * (1 + LEAST_GAIN) else self.stale + counts
        self.best = max(self.best, found)


def save_training(
    directory: Path,
    settings: dict[str, Any],
    progress: Progress,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Writes a checkpoint: the trained tensors and their optimizer's moments. names: of the parameters, in the order of
    the optimizer's groups. Raises ConfigError on a full disk."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(directory, error) from None
    saved = _parameter_tensors(names, tensors) | _optimizer_tensors(optimizer, names)
    save_checkpoint(directory, settings, progress, saved)


def resume_training(
    directory: Path,
    settings: dict[str, Any],
    names: Sequence[str],
    tensors: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    tell: Callable[[str], None],
) -> Progress | None:
    """Puts back what `save_training` wrote last; None where there is nothing. tell: takes lines for the user. Raises
    ConfigError as `load_checkpoint`, and where other tensors were saved."""
    found = load_checkpoint(directory, settings)
    if found is None:
        return None
    progress, saved, notes = found
    for note in notes:
        tell(note)
    _restore_parameters(directory, names, tensors, saved)
    _restore_optimizer(optimizer, names, saved)
    tell(f"going on from step {progress.step}")
    return progress


def save_checkpoint(directory: Path, settings: dict[str, Any], progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint and removes all but the newest two. Raises ConfigError on a full disk."""
    copied = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = json.dumps({"settings": settings, "progress": asdict(progress)})
    for left in directory.glob("step-*.part"):  # of a run that was killed while it wrote
        left.unlink(missing_ok=True)
    keep_file(_path(directory, progress.step), save(copied, metadata={"about": about}))
    for old in _checkpoints(directory)[:-KEPT]:
        old.unlink(missing_ok=True)


def load_checkpoint(directory: Path, settings: dict[str, Any]) -> tuple[Progress, dict[str, Tensor], list[str]] | None:
    """The newest checkpoint that can be read, and lines for the user; None where there is none.

    One that was not written to its end is removed. Raises ConfigError, and removes nothing, where it was made with
    other settings, where the disk does not let it be read, and where another program or version wrote it.
    """
    notes = []
    for path in reversed(_checkpoints(directory)):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ConfigError(
                f"the checkpoint {path} cannot be read ({error.strerror or error}): nothing was removed; see to the "
                "disk or the file's permissions, and start again"
            ) from None
        except (SafetensorError, ValueError):
            notes.append(f"{path.name} cannot be read: going on from the one before")
            path.unlink(missing_ok=True)
            continue
        progress = _progress(about)
        if progress is None:
            raise ConfigError(
                f"{path} is no checkpoint that this version can read: go on with the version that wrote it, or choose "
                "another --out"
            )
        made_with = about["settings"]
        differing = [name for name in settings if made_with.get(name) != settings[name]]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{directory} holds a training with {name.replace('_', ' ')} {made_with.get(name)}, not "
                f"{settings[name]}: go on with that, or choose another --out"
            )
        return progress, tensors, notes
    return None


def _restore_parameters(directory: Path, names: Sequence[str], own: Sequence[Tensor], saved: dict[str, Tensor]) -> None:
    """Copies what was saved into a training's own tensors. Raises ConfigError where names or shapes differ."""
    shapes = {f"{PARAMETER}{name}": tensor.shape for name, tensor in zip(names, own, strict=True)}
    if shapes != {name: tensor.shape for name, tensor in saved.items() if name.startswith(PARAMETER)}:
        raise ConfigError(
            f"{directory} holds a training of other weights (--layers, --projections or another model): go on with "
            "those, or choose another --out"
        )
    with torch.no_grad():
        for name, tensor in zip(names, own, strict=True):
            tensor.copy_(saved[f"{PARAMETER}{name}"])


def _parameter_tensors(names: Sequence[str], own: Sequence[Tensor]) -> dict[str, Tensor]:
    """What `_restore_parameters` takes, to be saved."""
    return {f"{PARAMETER}{name}": tensor for name, tensor in zip(names, own, strict=True)}


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """The moments of AdamW, by parameter name."""
    return {
        f"{key}/{name}": value
        for name, parameter in zip(names, _parameters(optimizer), strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: dict[str, Tensor]) -> None:
    """Puts back what `_optimizer_tensors` gave."""
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key}/{name}" in tensors:
                optimizer.state[parameter][key] = tensors[f"{key}/{name}"].to(parameter.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _progress(about: Any) -> Progress | None:
    """Where a training was; None where the file does not say. Fields that this version does not know are left out,
    those that the file's version did not know have their defaults."""
    if not isinstance(about, dict) or not all(isinstance(about.get(part), dict) for part in ("settings", "progress")):
        return None
    known = {field.name for field in fields(Progress)}
    return Progress(**{name: value for name, value in about["progress"].items() if name in known})


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.safetensors"


def has_checkpoint(directory: Path) -> bool:
    """Whether a training has left a checkpoint there, readable or not."""
    return bool(_checkpoints(directory))


def _checkpoints(directory: Path) -> list[Path]:
    """Oldest first; without what has such a name but no number, as a user's copy of one."""
    found = directory.glob("step-*.safetensors")
    return sorted(path for path in found if path.stem.removeprefix("step-").isdecimal())
