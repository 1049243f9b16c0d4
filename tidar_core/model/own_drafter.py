"""Models that draft by themselves: full TiDAR weights (paper, section 3), one set for both roles.

The engine reads one row of the embedding, that of the mask token which the model's contract names (`contract.py`), as
the input of every mask row and adds nothing to any layer; all else is as with an adapter. The mask is no word: it is
never emitted.
"""

from torch import Tensor

from tidar_core.config import ConfigError, ModelConfig
from tidar_core.model.adapter import Adapter
from tidar_core.model.adapter_config import AdapterConfig, BaseIdentity
from tidar_core.model.contract import OwnDrafter
from tidar_core.model.weights import AdapterWeights, LayerAdapter


def own_drafter(contract: OwnDrafter, base: BaseIdentity, config: ModelConfig, embedding: Tensor) -> Adapter:
    """The model's own drafting as an adapter that adds nothing. embedding: [vocab, hidden].

    Raises ConfigError where the vocabulary has no such mask token, or the mask would keep answers from ending.
    """
    if contract.mask_token_id in config.eos_ids:
        raise ConfigError(
            f"mask_token_id {contract.mask_token_id} of {base.name} is a token that ends answers, and a mask is never "
            "said: correct it"
        )
    described = AdapterConfig(  # no projection is adapted, so the rank is that of nothing
        base=base,
        rank=1,
        projections=(),
        block_length=contract.block_length,
        within_block=contract.within_block,
        slot_0=contract.slot_0,
        labels=contract.labels,
        holds=contract.holds,
    )
    slots = masked_slots(embedding, contract.mask_token_id, contract.block_length, base.name)
    weights = AdapterWeights(slots, (LayerAdapter(),) * base.layers)
    return Adapter(described, weights, "of its own", contract.mask_token_id)


def masked_slots(embedding: Tensor, mask_token: int, block_length: int, model: str) -> Tensor:
    """The inputs of slots that all hold the mask token: [block_length, hidden]. Raises ConfigError where the vocabulary
    has none of that id."""
    if mask_token >= len(embedding):
        raise ConfigError(
            f"mask_token_id {mask_token} of {model} is not in its vocabulary of {len(embedding)} tokens: correct it"
        )
    return embedding[mask_token].expand(block_length, -1).clone()
