"""What the ingress must know of a model: asked of one replica, once."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tidar_core.request import DraftMode, Sampling

if TYPE_CHECKING:  # half a second for whoever only starts replicas
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model. `name` is what clients call it, `root` what it was loaded from.

    fingerprint: of the base's weights; a prompt for this model is none for an engine of others. block_length is the
    drafter's (0 where there is none); drafts and sampling_defaults are used where a request says
    nothing. step_cost: what a step's rows cost where the card was made, as `StepCost.describe` has it (milliseconds).
    page_size: positions a K/V page, by which prefixes are cached. created: when the replica loaded it, in seconds since
    1970. Crosses Ray's own transport, inside the cluster.
    """

    name: str
    root: str
    created: int
    fingerprint: str
    adapter: str | None
    dtype: str
    device: str
    exact: bool
    block_length: int
    max_model_len: int
    page_size: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    drafts: DraftMode
    sampling_defaults: Sampling
    step_cost: Mapping[str, Sequence[float]]
    tokenizer: "PreTrainedTokenizerFast"

    def describe(self) -> dict[str, object]:
        """The entry of `/v1/models`, in OpenAI's shape with vLLM's `root` and `max_model_len`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tidar",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
            "tidar": {
                "block_length": self.block_length,
                "exact": self.exact,
                "adapter": self.adapter,
                "dtype": self.dtype,
                "device": self.device,
                "drafts": self.drafts,
                "sampling_defaults": asdict(self.sampling_defaults),
                "step_cost": self.step_cost,
            },
        }


def tokenizer_backend(card: ModelCard) -> "Tokenizer":
    """The tokenizer's Rust half, which many threads may use at once; it never cuts or pads."""
    backend = card.tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend
