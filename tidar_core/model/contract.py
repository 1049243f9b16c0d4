"""`tidar.json`: how a model drafts that does so by itself, with full TiDAR weights (paper, section 3).

Such a checkpoint is an ordinary one in transformers' layout with this file more: which token of the vocabulary is the
mask, and how the model was trained to fill it in. Weights that others trained can be brought in by writing it, beside
them or anywhere else (`--adapter PATH/tidar.json`). Nothing here needs torch.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tidar_core.config import Architecture, ConfigError
from tidar_core.layout import BlockForm, WithinBlock
from tidar_core.model.adapter_config import CONFIG_FILE
from tidar_core.model.sources import from_home
from tidar_core.settings import first_mistake

CONTRACT_FILE = "tidar.json"


class OwnDrafter(BaseModel):
    """`tidar.json`. Unknown keys are refused.

    mask_token_id: the token that stands in all slots of a proposal; its row of the embedding is their input.
    block_length: slots a proposal was trained with. within_block, slot_0, labels, holds: as in `AdapterConfig`.
    architecture: what the model is, where its config.json has a model_type of its own. training: how the weights came
    about, free of form.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[1] = 1
    architecture: Architecture | None = None
    mask_token_id: int = Field(ge=0)
    block_length: int = Field(ge=2)
    within_block: WithinBlock = "bidirectional"
    slot_0: Literal["mask", "anchor"] = "mask"
    labels: Literal["aligned", "shifted"] = "aligned"
    holds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    training: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_a_form(self) -> "OwnDrafter":
        BlockForm(self.within_block, self.slot_0, self.labels)  # which says what does not go together
        return self


def read_own_drafter(directory: Path) -> OwnDrafter | None:
    """The contract of the checkpoint in `directory`; None where it has none. Raises ConfigError in one line."""
    path = directory / CONTRACT_FILE
    return read_contract(path) if path.exists() else None


def read_contract(path: Path) -> OwnDrafter:
    """A contract, wherever it lies. Raises ConfigError in one line."""
    if path.name == CONFIG_FILE or path.suffix == ".safetensors":
        raise ConfigError(f"{path} is a part of an adapter: give its folder")
    try:
        return OwnDrafter.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ConfigError(f"{path} is not valid: {first_mistake(error, OwnDrafter)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None


def stated_architecture(adapter: str) -> Architecture | None:
    """What the contract that is named as `adapter` says that the model is; None where another thing is named, or
    nothing said. Raises ConfigError as `read_contract`."""
    place = from_home(adapter)
    return read_contract(place).architecture if place.is_file() else None
