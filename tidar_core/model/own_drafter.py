"""Models that draft by themselves: full TiDAR weights (paper, section 3), one set for both roles.

The engine reads one row of the embedding, that of the mask token which the model's contract names (`contract.py`), as
the input of every mask row and adds nothing to any layer; all else is as with an adapter. The mask is no word: it is
never emitted.
"""

from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.model.adapter import Adapter
from tidar_core.model.adapter_config import AdapterConfig, BaseIdentity
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter
from tidar_core.model.weights import AdapterWeights, LayerAdapter


def own_drafter(contract: OwnDrafter, base: BaseIdentity, embedding: Tensor) -> Adapter:
    """The model's own drafting as an adapter that adds nothing. embedding: [vocab, hidden].

    Raises ConfigError where the vocabulary has no such mask token.
    """
    if contract.mask_token_id >= len(embedding):
        raise ConfigError(
            f"{CONTRACT_FILE} of {base.name} names mask_token_id {contract.mask_token_id}, but the vocabulary has "
            f"{len(embedding)} tokens: correct it"
        )
    slots = embedding[contract.mask_token_id].expand(contract.block_length, -1).clone()
    config = AdapterConfig(  # no projection is adapted, so the rank is that of nothing
        base=base,
        rank=1,
        projections=(),
        block_length=contract.block_length,
        within_block=contract.within_block,
        slot_0=contract.slot_0,
        labels=contract.labels,
        holds=contract.holds,
    )
    layers = (LayerAdapter(None, None, None, None),) * base.layers
    return Adapter(config, AdapterWeights(slots, layers), "of its own", contract.mask_token_id)
