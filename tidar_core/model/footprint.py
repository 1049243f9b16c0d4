"""How much memory a model's weights take, told by the headers of its files alone."""

from tidar_core.config import ModelConfig, ServedDType
from tidar_core.model.loading import numbers_to_load
from tidar_core.model.sources import ModelSource
from tidar_core.transfer import arithmetic_dtype

_LAYER_BYTES = {"int8": 1, "int4": 10 / 16}  # of a number in a layer's matrix (`cpu_pack.py`)


def weights_bytes(source: ModelSource, model: ModelConfig, served: ServedDType) -> float:
    """Bytes that the weights take on a CPU once they are loaded: a head that is tied is packed beside the embedding.
    What is in memory for a while, as one layer before it is packed, is not counted. Raises ConfigError as
    `numbers_to_load`."""
    in_layers, beside = numbers_to_load(source, model)
    itemsize, rows = arithmetic_dtype(served).itemsize, model.vocab_size * model.hidden_size
    packed_head = rows * (1 if served in _LAYER_BYTES else itemsize) if beside < 2 * rows else 0
    return in_layers * _LAYER_BYTES.get(served, itemsize) + beside * itemsize + packed_head
