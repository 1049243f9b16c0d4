"""What the ingress must know of a model: asked of one replica, once."""

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any

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
    1970.
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


@dataclass(frozen=True, slots=True)
class PackedCard:
    """A card as it crosses Ray's own transport, inside the cluster.

    facts: all of its fields but the tokenizer. tokenizer: its pickle, compressed, since that of 150,000 tokens is 5 MB
    and gRPC by itself takes no more than 4; empty for an ingress that has the one with this digest.
    """

    facts: Mapping[str, Any]
    digest: str
    tokenizer: bytes


def pack_card(card: ModelCard) -> PackedCard:
    """What a replica sends of its card."""
    facts = {field.name: getattr(card, field.name) for field in fields(card) if field.name != "tokenizer"}
    pickled = pickle.dumps(card.tokenizer)
    return PackedCard(facts, sha256(pickled).hexdigest(), zlib.compress(pickled, 1))


def unpacked_tokenizer(packed: PackedCard) -> "PreTrainedTokenizerFast":
    """The tokenizer that came with a card; takes a third of a second for 150,000 tokens."""
    tokenizer: PreTrainedTokenizerFast = pickle.loads(zlib.decompress(packed.tokenizer))
    return tokenizer


def tokenizer_backend(card: ModelCard) -> "Tokenizer":
    """The tokenizer's Rust half, which many threads may use at once; it never cuts or pads."""
    backend = card.tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend
