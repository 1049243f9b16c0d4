"""`adapter.json`: what a drafter adapter says of itself. Nothing here needs torch.

The format names more drafters than the engine runs today, so that other published lossless drafters can be described
in it; what the engine cannot run is refused by name.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tidar_core.config import MIXTURES, Architecture, ConfigError
from tidar_core.layout import BlockForm, WithinBlock
from tidar_core.settings import first_mistake

CONFIG_FILE = "adapter.json"

Projection = Literal["qkv", "o", "gate_up", "down", "expert"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
OF_DENSE: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")
OF_MIXTURES: tuple[Projection, ...] = ("qkv", "o", "expert")

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class BaseIdentity(BaseModel):
    """The model that an adapter is for: name, hashes of weights and vocabulary, and the shape an adapter must fit.

    cuts: a hash of how the vocabulary cuts text; empty in adapters that are older than this key.
    """

    model_config = _STRICT

    name: str
    fingerprint: str
    tokenizer: str
    cuts: str = ""
    architecture: Architecture
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """What an adapter may act on: where there are experts, not on these, but mask rows have one of their own."""
        return OF_MIXTURES if self.architecture in MIXTURES else OF_DENSE

    def pair_shapes(self, projection: Projection, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the two matrices that an adapter of a rank has for a projection (`weights.LayerAdapter`)."""
        if projection == "expert":
            return (2 * rank, self.hidden_size), (self.hidden_size, rank)
        attention = self.heads * self.head_dim
        ins, outs = {
            "qkv": (self.hidden_size, attention + 2 * self.kv_heads * self.head_dim),
            "o": (attention, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }[projection]
        return (rank, ins), (outs, rank)


class AdapterConfig(BaseModel):
    """`adapter.json`. Unknown keys are refused.

    layers: those that are adapted, from 0 on, None for all.
    slot_head: width of the head that corrects a slot by the token before it (`weights.SlotHead`), 0 without one.
    block_length: slots a proposal was trained with. within_block: whether slots of a proposal see each other both
    ways or only the earlier ones. slot_0: what stands in slot 0, a mask or the anchor. slot_tokens: what stands in
    the others. labels: "aligned" where a slot guesses its own position, "shifted" where it guesses the next.
    holds: how often the draft of slot 1, 2, … holds where those before it do, as measured: what the draft policy
    expects until it has seen some. training: how the drafter came about, free of form.
    """

    model_config = _STRICT

    format: Literal[1] = 1
    kind: Literal["low-rank", "projections"] = "low-rank"
    base: BaseIdentity
    rank: int = Field(ge=1)
    projections: tuple[Projection, ...] = OF_DENSE
    layers: tuple[int, ...] | None = None
    slot_head: int = Field(default=0, ge=0)
    block_length: int = Field(ge=2)
    within_block: WithinBlock
    slot_0: Literal["mask", "anchor"] = "mask"
    slot_tokens: Literal["mask", "random"] = "mask"
    labels: Literal["aligned", "shifted"] = "aligned"
    holds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    training: dict[str, Any] = {}

    @model_validator(mode="after")
    def _layers_are_the_bases(self) -> "AdapterConfig":
        if self.layers is not None and not set(self.layers) <= set(range(self.base.layers)):
            raise ValueError(f"layers {list(self.layers)} are not all from 0 to {self.base.layers - 1}")
        return self

    @model_validator(mode="after")
    def _projections_are_the_bases(self) -> "AdapterConfig":
        if others := [name for name in self.projections if name not in self.base.projections]:
            known = ", ".join(self.base.projections)
            raise ValueError(f"{self.base.architecture} has no {others[0]} to adapt, only {known}")
        return self

    @model_validator(mode="after")
    def _has_a_form(self) -> "AdapterConfig":
        BlockForm(self.within_block, self.slot_0, self.labels)  # which says what does not go together
        return self

    @property
    def form(self) -> BlockForm:
        """How its proposals are laid."""
        return BlockForm(self.within_block, self.slot_0, self.labels)

    def adapts(self, layer: int, projection: Projection) -> bool:
        """Whether a layer's projection is adapted."""
        return projection in self.projections and (self.layers is None or layer in self.layers)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """`adapter.json` of the adapter in `directory`, validated. Raises ConfigError in one line."""
    path = directory / CONFIG_FILE
    try:
        return AdapterConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (directory / "adapter_config.json").is_file():
            raise ConfigError(
                f"{directory} holds an adapter of PEFT, which changes a model's words and drafts nothing: merge it "
                "into its base, and make a drafter for that with tidar convert"
            ) from None
        raise ConfigError(f"no adapter at {directory}: there is no {CONFIG_FILE}") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not valid: {first_mistake(error, AdapterConfig)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
