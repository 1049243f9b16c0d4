"""Tiny random checkpoints and drafter adapters, written to disk and read by the real loader.

They are whole transformers checkpoints: a few random layers, a byte-level BPE tokenizer trained on the spot and a
chat template. Nothing is downloaded, a checkpoint takes well under a second.

The weights are drawn large enough that a greedy answer wanders instead of repeating itself. A few `likely` tokens
(printable ones, no special token among them) win nearly every argmax, so that even a random drafter guesses right
now and then: accepted, cut and rejected runs all happen within some dozen tokens.
"""

import json
import re
from math import pi
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tidar_core.config import Architecture
from tidar_core.model.adapter import Adapter, identify_base, save_adapter
from tidar_core.model.adapter_config import AdapterConfig, Projection
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LowRank, SlotHead

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "In the beginning there was a word; then there were many words, and nobody counted them.",
    "def add(first, second):\n    return first + second\n",
    "for index in range(10):\n    print(index, index * index)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Le cœur a ses raisons que la raison ne connaît point.",
    "東京は今日も雨です。明日は晴れるでしょう。",
    "It costs 12.50 € or 1,337 ¥ – a fair price? 🙂 Yes!",
    "What is the answer? The answer is what the question was about.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, surely.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# Tools as the templates of Qwen, Llama 3, Mistral and Qwen3-Coder have them, in fewer words.
TOOL_CHAT = (
    "{%% if tools %%}<|im_start|>system\nYou may call:{%% for tool in tools %%}\n{{ tool | tojson }}{%% endfor %%}"
    "<|im_end|>\n{%% endif %%}"
    "{%% for message in messages %%}"
    "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{%% if message.role == 'tool' %%}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{%% else %%}{{ message.content }}{%% endif %%}"
    "{%% for call in message.tool_calls or () %%}%s{%% endfor %%}<|im_end|>\n"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
HERMES_TEMPLATE = TOOL_CHAT % (
    '\n<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
)
LLAMA_TEMPLATE = TOOL_CHAT % (
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
)
MISTRAL_TEMPLATE = TOOL_CHAT % (
    "{% if call.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{% endif %}"
    "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ']' if loop.last }}"
)
QWEN_CODER_TEMPLATE = TOOL_CHAT % (
    "{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>\n' }}"
    "{% if value is mapping or (value is sequence and value is not string) %}{{ value | tojson }}"
    "{% else %}{{ value | string }}{% endif %}"
    "{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)


# What an architecture is known by, which its configuration's defaults leave out.
PARTICULAR: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0
    },
    "cwm": {"bos_token_id": 1, "sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"]},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "gemma3_text": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granitemoe": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
        "num_local_experts": 4,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64},
}  # fmt: skip


def tiny_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab` tokens: ids 0, 1 and 2 are end of text, turn start, turn end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_checkpoint(
    directory: Path,
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    hidden: int = 96,
    head_dim: int | None = None,
    intermediate: int = 160,
    vocab: int = 512,
    max_positions: int = 1024,
    bias: bool = False,
    rope: dict[str, Any] | None = None,
    stated: dict[str, Any] | None = None,
    likely: int = 8,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
) -> Path:
    """Write a random checkpoint in transformers' layout into `directory` (created) and return it.

    `head_dim` is hidden / heads unless given, for qwen3 twice that. `bias` adds the optional biases (qwen2 always has
    its own). `stated` adds to config.json. `rope` adds to rope_parameters (else unscaled, theta
    10,000). `likely` tokens win nearly every argmax (0: none is preferred). `dtype` is that of the file; `shard_size`
    below the checkpoint's size writes several files.
    """
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})},
    }
    if architecture != "qwen2":
        shape |= {
            "attention_bias": bias,
            "head_dim": 2 * hidden // heads if architecture == "qwen3" else hidden // heads,
        }
    if architecture in ("ernie4_5", "granite", "helium", "llama", "seed_oss", "smollm3"):
        shape |= {"mlp_bias": bias, "use_bias": bias, "attention_out_bias": bias}
    if architecture == "ministral3":
        scaled = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": max_positions}
        shape["rope_parameters"] = scaled | shape["rope_parameters"]
    if architecture in ("gemma3_text", "olmo3"):  # each kind of layer has its own
        whole, windowed = shape["rope_parameters"], {"rope_type": "default", "rope_theta": 500.0}
        shape["rope_parameters"] = {"full_attention": whole, "sliding_attention": windowed}
    if head_dim:
        shape |= {"head_dim": head_dim}
    shape |= PARTICULAR.get(architecture, {}) | (stated or {})
    config = AutoConfig.for_model(architecture, **shape)

    tokenizer = tiny_tokenizer(vocab)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, tokenizer, torch.Generator().manual_seed(seed), likely)
    model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(directory, max_shard_size=shard_size)
    tokenizer.save_pretrained(directory)
    return directory


def tool_tokenizer(template: str = HERMES_TEMPLATE, vocab: int = 512) -> PreTrainedTokenizerFast:
    """A tiny tokenizer with the tags of tool calls as tokens that are no special ones, as Qwen's has them, or
    Mistral's, which is."""
    tokenizer = tiny_tokenizer(vocab - 2)
    if "[TOOL_CALLS]" in template:
        tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    tokenizer.chat_template = template
    return tokenizer


def thinking_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """A tiny tokenizer whose model thinks before it answers: tags and template as Qwen3's."""
    tokenizer = tiny_tokenizer(vocab - 2)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


def randomise(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator, likely: int
) -> None:
    """Draw a model's weights as `tiny_checkpoint` wants them."""
    with torch.no_grad():
        choices = ((name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name)
        for name, parameter in sorted((*model.named_parameters(), *choices)):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # around 1, so that a forgotten or swapped norm shows; Gemma adds the 1 itself
                parameter.copy_(0.2 * noise + (not model.config.model_type.startswith("gemma")))
            else:
                # What the layers add must outweigh the embedding: a tied head would else repeat its input.
                parameter.copy_((0.06 if "embed" in name or "lm_head" in name else 0.25) * noise)
        if likely:
            vocab = tokenizer.get_vocab()
            words = sorted(id for token, id in vocab.items() if id > 258 and token.removeprefix("Ġ").isascii())
            order = torch.randperm(len(words), generator=generator)[:likely].tolist()
            model.get_output_embeddings().weight[[words[i] for i in order]] *= 4.0


def edit_json(path: Path, **changes: object) -> None:
    """Change top-level keys of a JSON file; the value None removes a key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def with_many_words(directory: Path, words: int = 130_000) -> Path:
    """A checkpoint whose tokenizer is as large as a real one's, by tokens that no text comes to. Returns it."""
    path = directory / "tokenizer.json"
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in written["added_tokens"]}  # which else come behind all
    first = max(vocabulary.values()) + 1
    vocabulary |= {f"word{number:06d}": first + number for number in range(words)}
    path.write_text(json.dumps(written))
    return directory


def tiny_adapter(
    directory: Path,
    model_directory: Path,
    *,
    rank: int = 4,
    slot_head: int = 16,
    block_length: int = 4,
    within_block: Literal["bidirectional", "causal"] = "bidirectional",
    seed: int = 0,
) -> Path:
    """Write a random drafter adapter for the checkpoint in `model_directory` into `directory` and return it."""
    source = find_model(str(model_directory))
    config, tokenizer = load_config(source), load_tokenizer(source)
    base = identify_base(source.name, config, load_weights(source, config, torch.float32, "cpu"), tokenizer)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.25 * torch.randn(shape, generator=generator)

    def low_rank(projection: Projection) -> LowRank:
        a, b = base.pair_shapes(projection, rank)
        return LowRank(random(*a), random(*b))

    weights = AdapterWeights(
        slot_embeddings=random(block_length, base.hidden_size),
        layers=tuple(
            LayerAdapter(**{projection: low_rank(projection) for projection in base.projections})
            for _ in range(base.layers)
        ),
        slot_head=SlotHead(
            hidden=random(slot_head, base.hidden_size),
            token=random(slot_head, base.hidden_size),
            state=random(slot_head, slot_head),
            out=random(base.hidden_size, slot_head),
        )
        if slot_head
        else None,
    )
    adapter_config = AdapterConfig(
        base=base,
        rank=rank,
        projections=base.projections,
        slot_head=slot_head,
        block_length=block_length,
        within_block=within_block,
    )
    save_adapter(Adapter(adapter_config, weights, directory.name), directory)
    return directory


def tiny_gguf(
    path: Path, checkpoint: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, padding: int = 0
) -> Path:
    """Write the checkpoint in the directory `checkpoint` as the GGUF file `path` and return it.

    Matrices are stored as `kind` (rows must be a multiple of its block), vectors and routers as fp32. llama.cpp's
    converter settles what tensors are called, that a layer's experts are one, how the rows of llama's q and k are laid
    out and how rope scaling is written. Tokenizer and chat template travel along; `padding` is its padding token.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    architecture = "llama" if config.model_type == "mixtral" else config.model_type.replace("_moe", "moe")
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, add in (
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if hasattr(config, key):
            add(getattr(config, key))
    _write_rope(writer, config.rope_parameters, head_dim)
    _write_vocabulary(writer, checkpoint, padding)
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    called = get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, values in _stacked(checkpoint).items():
        if "shared_expert_gate" in name:
            values = values[0]
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = values.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        in_file = called.get_name(name, try_suffixes=(".weight", ".bias"))
        assert in_file is not None, name
        stored = kind if values.dim() > 1 and "ffn_gate_inp" not in in_file else GGMLQuantizationType.F32
        writer.add_tensor(in_file, quantize(values.contiguous().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, those of a layer's experts on top of each other."""
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for file in checkpoint.glob("*.safetensors"):
        for name, values in load_file(file).items():
            of_expert = re.fullmatch(r"(.+\.experts)\.(\d+)(\..+)", name)
            if of_expert is None:
                tensors[name] = values.float()
            else:
                stem, expert, part = of_expert.groups()
                stacks.setdefault(stem + part, {})[int(expert)] = values.float()
    return tensors | {name: torch.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}


def _write_rope(writer: GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(_llama3_divisors(rope, head_dim), dtype=np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if key in rope:
                add(rope[key])


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """By wavelength, against the length the model was first trained on: short waves stay, long ones grow by factor."""
    divisors = []
    for coordinate in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * pi * rope["rope_theta"] ** (coordinate / head_dim))
        between = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        kept = min(1.0, max(0.0, between))
        divisors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return divisors


def _write_vocabulary(writer: GGUFWriter, checkpoint: Path, padding: int) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {END_OF_TEXT, TURN_START, TURN_END}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(padding)
    writer.add_chat_template(CHAT_TEMPLATE)
