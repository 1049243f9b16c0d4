"""Frozen descriptions of a model and of an engine, derived once at start-up."""

from dataclasses import dataclass
from typing import Literal

from tidar_core.request import DraftMode

Architecture = Literal[
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "helium",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
]
MIXTURES: frozenset[Architecture] = frozenset(
    ("ernie4_5_moe", "glm4_moe", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
)  # of experts
Device = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32"]
RoundedDType = Literal["int8", "int4"]
ServedDType = Literal["bfloat16", "float32", "float8", RoundedDType]
Norms = Literal["before", "behind", "both"]
Activation = Literal["silu", "gelu_tanh"]
KVDType = Literal["model", "float8"]
GenerationConfig = Literal["auto", "none"]

DEFAULT_MODEL = "smollm2-135m-instruct"
KNOWN_ROWS = 512


class ConfigError(ValueError):
    """A model, adapter or setting that cannot be used; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context: transformers' rope_parameters, None if not stated.

    `divisors` [head_dim / 2] belong to the type "divisors" alone, which divides each frequency by a number of its own:
    llama3 scaling as GGUF files hold it. `short_factor` and `long_factor` [rotary_dim / 2] are longrope's, `long` says
    which of them is in use.
    """

    rope_type: Literal["linear", "llama3", "yarn", "longrope", "divisors"]
    factor: float = 1.0
    original_max_position_embeddings: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    divisors: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a mixture of experts: in the layers `layers` each row goes through `chosen` of `count` experts of
    intermediate size `inner`.

    scores: how the router's logits become scores. The experts with the highest scores are chosen; where `biased`, a
    number of each expert's own is added for the choice alone. A chosen expert's score, divided by the sum of the chosen
    ones where `renormalised`, times `scale`, is the share by which its result counts. shared_inner: the size of an MLP
    that all rows go through besides, 0 for none. shared_gated: its result has a share too, from the router's last row.
    """

    count: int
    chosen: int
    inner: int
    layers: tuple[int, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = True
    biased: bool = False
    scale: float = 1.0
    shared_inner: int = 0
    shared_gated: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a causal language model that the one decoder can run.

    `max_positions` is the number of positions the model knows, rope scaling included. A model that `stretches_to` more
    does so by other rotary frequencies, thus other keys, for every position (`rope.stretched`). `eos_ids` end an
    answer.

    In the layers `windowed` a token sees the last `window` positions, its own included; in all others, and where
    `window` is None, it sees all. `window_theta`: the rotary base of these layers, unscaled, where it differs.

    `rotary_dim`: how many of a head's coordinates rotate, the first ones (None: all). `interleaved`: the checkpoint has
    the two coordinates of a pair side by side, else they are half of `rotary_dim` apart. In the layers `unrotated` no
    coordinate rotates. `norms` stand before attention and MLP, behind them (before the sum), or both. `qk_norm`: a norm
    of each query and key head; `wide_qk_norm`: one over all heads together. `norms_less_one`: the checkpoint stores
    norm weights minus 1 (Gemma). The scales are multiplied into weights and tables when they are loaded:
    `embedding_scale` into the embedding, `logit_scale` into the final norm, `rotary_scale` into cos and sin. Where
    there are `experts`, `intermediate_size` is that of the layers without them.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    windowed: tuple[int, ...] = ()
    window_theta: float | None = None
    stretches_to: int | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    unrotated: tuple[int, ...] = ()
    norms: Norms = "before"
    wide_qk_norm: bool = False
    norms_less_one: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    rotary_scale: float = 1.0
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user chooses about one engine.

    model: `DEFAULT_MODEL`, a directory, a GGUF file or a hub id.
    adapter: a directory, "default" for what the model brings along or else the one shipped for it (none where none is),
        "none", or the file that says how the model drafts by itself (`tidar.json`, see `model.contract`).
    dtype: of weights and arithmetic; int8 and int4 (CPUs only) keep the base's matrices in 8 and 4 bits and multiply
        rows rounded to 8 bits with them, float8 rounds those of the layers (and keeps them so on a GPU); all else is
        bfloat16.
    kv_dtype: of the K/V pages: as the arithmetic ("model"), or float8, of half the size on a GPU.
    device: "auto" takes a GPU where there is one. threads: CPU threads, 0 for torch's default.
    drafts: how much is drafted where a request does not say, for whoever makes requests.
    max_model_len: positions a sequence may use; 0 for the model's own limit.
    cache_tokens: K/V positions to hold; 0 for what a share of the memory allows. page_size: those of a page.
    max_running: sequences decoded at once. step_rows: rows of known tokens computed in one step at most;
        0 for as many as leave prompts room beside that many sequences. On a CPU prompts have fewer where so many would
        take more than 2 s, by measured cost: engines that are not exact may answer otherwise with each measurement.
    exact: on a GPU, matrix products that give a row the same bits in any batch, or else torch's.
    graphs: on a GPU, steps as CUDA graphs.
    overlap_steps: plan the next step while one runs. None: on a GPU yes, on a CPU no.
    overlap_launches: on a GPU that can (Hopper's), kernels begin while the one before still runs.
    generation_config: "auto" takes what a request says nothing of from the model's makers, where they state how it is
        to be sampled (generation_config.json, or the GGUF file's header); "none" takes neutral values.
    """

    model: str = DEFAULT_MODEL
    adapter: str = "default"
    dtype: ServedDType = "bfloat16"
    device: Device = "auto"
    threads: int = 0
    drafts: DraftMode = "auto"
    max_model_len: int = 0
    cache_tokens: int = 0
    page_size: int = 16
    max_running: int = 64
    step_rows: int = 0
    exact: bool = True
    graphs: bool = True
    overlap_steps: bool | None = None
    overlap_launches: bool = True
    kv_dtype: KVDType = "model"
    generation_config: GenerationConfig = "auto"

    @property
    def known_rows(self) -> int:
        """Rows of known tokens in a step, at most. Each sequence that decodes has one of them; where these were all,
        no prompt would ever be read beside them."""
        return self.step_rows or max(KNOWN_ROWS, 2 * self.max_running)
