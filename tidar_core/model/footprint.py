"""What a model's weights take in memory and in work, told by the headers of its files alone."""

from tidar_core.config import ModelConfig, ServedDType
from tidar_core.model.loading import numbers_to_load
from tidar_core.model.sources import ModelSource
from tidar_core.transfer import arithmetic_dtype

_LAYER_BYTES = {"int8": 1, "int4": 10 / 16}  # of a number in a layer's matrix (`cpu_pack.py`)


def weights_bytes(source: ModelSource, model: ModelConfig, served: ServedDType, packed: bool) -> float:
    """Bytes that the weights take on a CPU once they are loaded: the layers, the embedding, and the head, which is
    never kept in less than 8 bits. packed: whether matrices are laid out for the products; a tied head then lies beside
    the embedding. Neither a drafter is counted nor what is in memory for a while, as a layer or an untied head before
    it is packed. Raises ConfigError as `numbers_to_load`."""
    in_layers, _ = numbers_to_load(source, model)
    itemsize, rows = arithmetic_dtype(served).itemsize, model.vocab_size * model.hidden_size
    apart = packed or not model.tied_head or model.embedding_scale != 1
    head = rows * (1 if served in _LAYER_BYTES else itemsize) if apart else 0
    return in_layers * _LAYER_BYTES.get(served, itemsize) + (rows + model.hidden_size) * itemsize + head


def numbers_a_token(source: ModelSource, model: ModelConfig) -> int:
    """How many numbers in the layers a token is computed with: of a mixture's experts those that are chosen for it.
    Raises ConfigError as `numbers_to_load`."""
    in_layers, _ = numbers_to_load(source, model)
    if model.experts is None:
        return in_layers
    idle = model.experts.count - model.experts.chosen
    return in_layers - len(model.experts.layers) * idle * 3 * model.hidden_size * model.experts.inner
