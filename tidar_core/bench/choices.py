"""Words of the configuration, for options that take several of them."""

from enum import StrEnum


class PeerName(StrEnum):
    """The peers that a worker can run."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama.cpp"


class DTypeChoice(StrEnum):
    """`config.ServedDType`, where several may be named."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT8 = "float8"
    INT8 = "int8"
    INT4 = "int4"


class DraftsChoice(StrEnum):
    """`request.DraftMode`, where several may be named."""

    OFF = "off"
    AUTO = "auto"
    FULL = "full"


class KVChoice(StrEnum):
    """`config.KVDType`, where several may be named."""

    MODEL = "model"
    FLOAT8 = "float8"
