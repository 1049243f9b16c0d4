"""The drafter adapter: its tensors on disk, the checks that it fits a model, the adapters that are shipped.

An adapter is a directory of two files. `adapter.json` (adapter_config.py) says which base it was made for and what its
drafter does. `adapter.safetensors` holds `mask_embedding` ([block_length, hidden], the inputs of the mask rows by
slot) and for every layer i and adapted projection `layers.{i}.{projection}.A` ([rank, in]) and `.B` ([out, rank]):
on mask rows alone y = x Wᵀ + (x Aᵀ) Bᵀ, without another scale. Projections are fused as in `weights.py`. Where the
drafter has a slot head, its four matrices are `slot_head.hidden`, `.token`, `.state` and `.out`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tidar_core.config import ConfigError, ModelConfig
from tidar_core.files import write_atomically
from tidar_core.model.adapter_config import (
    CONFIG_FILE,
    PROJECTIONS,
    AdapterConfig,
    BaseIdentity,
    Projection,
    read_adapter_config,
)
from tidar_core.model.fingerprint import fingerprint
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LowRank, ModelWeights, SlotHead, named_tensors

WEIGHTS_FILE = "adapter.safetensors"
# What ways of cutting text differ in. No letter of it is of two signs that one stands for: files of one model differ in
# whether they put these together first, and cut alike but for that.
CUT_PROBE = (
    "It's what they're told, we'll say I'd OR I'LL don't: \"so\" (O'Neil) -- 7 42 365 1234567 3.14159 1,000,000.00 x²\n"
    "def f(x):\n    return {'key': [x*2, -1]}  # note...\n\n\tif (a <= b && !c) { i++; }\t\t//  ok\n\n\n"
    "      six spaces,   three \t and\r\na break   \n"
    "HTTPServer camelCase snake_case SCREAMING_CASE https://example.org/a?b=c&d=%20\n"
    "naïve café Größe Ærø Łódź İstanbul ÜBERRASCHUNG\n"
    "日本語のテキスト、中文字符。 한국어 Привет, мир! العربية हिन्दी ไทย 👩\u200d🚀🙂\n"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A drafter: its config, its tensors, and the name of its directory. mask_token: the token of the vocabulary that
    its slots hold, None where they hold mask embeddings of their own."""

    config: AdapterConfig
    weights: AdapterWeights
    name: str
    mask_token: int | None = None


def identify_base(
    name: str, config: ModelConfig, weights: ModelWeights, tokenizer: PreTrainedTokenizerBase
) -> BaseIdentity:
    """The identity that an adapter has to fit, of the loaded model called `name`."""
    return shape_of(name, config, tokenizer, fingerprint(weights))


def shape_of(
    name: str, config: ModelConfig, tokenizer: PreTrainedTokenizerBase, weights_fingerprint: str = ""
) -> BaseIdentity:
    """The identity that an adapter has to fit, without the fingerprint: known before the weights are read."""
    return BaseIdentity(
        name=name,
        fingerprint=weights_fingerprint,
        tokenizer=tokenizer_fingerprint(tokenizer),
        cuts=cuts_fingerprint(tokenizer),
        architecture=config.architecture,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of which token has which id: 16 hex digits.

    The `[PAD1234]` tokens with which GGUF files fill a vocabulary up to the embedding's rows are left out.
    """
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token != f"[PAD{number}]")
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def cuts_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of how text becomes tokens of that vocabulary: 16 hex digits.

    Of what comes out, not of what files say: a folder and a GGUF file of one model say it in different words.
    """
    tokens = tokenizer.encode(CUT_PROBE, add_special_tokens=False, verbose=False)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def load_adapter(
    directory: Path,
    base: BaseIdentity,
    dtype: torch.dtype,
    device: torch.device | str,
    report: Callable[[str], None] | None = None,
) -> Adapter:
    """Read the adapter in `directory` for the model `base`, as `dtype` onto `device`.

    Raises ConfigError where a file is missing or broken, where shapes or tokenizer do not fit, and for a drafter
    that the engine does not run. Other weights of a fitting base, or other cuts of text into its tokens, are one line
    to `report`: the drafts may hold less often, the text cannot change.
    """
    config = read_adapter_config(directory)
    _check_supported(directory, config)
    _check_fit(directory, config.base, base)
    strange = _strange(config.base, base)
    if strange and report is not None:
        report(
            f"adapter {directory.name} was made for {' and '.join(strange)} ({config.base.name}) than {base.name}: "
            "its drafts may hold less often, the text stays the model's own"
        )
    path = directory / WEIGHTS_FILE
    expected = dict(_expected_tensors(config))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _check_tensors(path, expected, {name: tuple(file.get_slice(name).get_shape()) for name in names})
            # Copied out of the file's mapping, so that memory is aligned as for any other weight.
            tensors = {
                name: torch.empty(shape, dtype=dtype, device=device).copy_(file.get_tensor(name))
                for name, shape in expected.items()
            }
    except FileNotFoundError:
        raise ConfigError(f"the adapter {directory} has no {WEIGHTS_FILE}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error})") from None
    return Adapter(config, _assemble(config, tensors), directory.name)


def load_trained(
    directory: Path,
    base: BaseIdentity,
    dtype: torch.dtype,
    device: torch.device | str,
    report: Callable[[str], None] | None = None,
) -> AdapterWeights:
    """`load_adapter` for the trainer's passes. Raises ConfigError for drafters that these do not know, too."""
    adapter = load_adapter(directory, base, dtype, device, report)
    check_trainable(adapter.config, directory)
    return adapter.weights


def check_trainable(config: AdapterConfig, directory: Path) -> None:
    """Raises ConfigError unless slots guess their own position, as the trainer's passes are laid out."""
    if config.labels != "aligned":
        stated = f"labels {config.labels!r}"
        raise ConfigError(f"adapter {directory.name}: a drafter with {stated} can be served, but not trained on")


def save_adapter(adapter: Adapter, directory: Path) -> None:
    """Write `adapter` into `directory` (created), over one that is there, by `write_atomically`. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    held = dict(named_tensors(adapter.weights))
    tensors = {name: held[name].detach().cpu().contiguous() for name, _ in _expected_tensors(adapter.config)}
    weights, config = save(tensors, metadata={"format": "pt"}), adapter.config.model_dump_json(indent=2) + "\n"
    write_atomically({directory / WEIGHTS_FILE: weights, directory / CONFIG_FILE: config.encode()})


def default_adapter_for(base: BaseIdentity) -> Path | None:
    """The shipped adapter made for the model `base`, by its weights or, failing that, by its name; None if none is."""
    shipped = [(path, read_adapter_config(path).base) for path in shipped_adapters()]
    for path, known in shipped:
        if known.fingerprint == base.fingerprint:
            return path
    name = base.name.rpartition("/")[2].lower()
    for path, known in shipped:
        if known.name.lower() == name and not _misfits(known, base):
            return path
    return None


def may_have_default(base: BaseIdentity) -> bool:
    """Whether a shipped adapter fits the model `base`, so that it may be for its weights, whatever that is called."""
    return any(not _misfits(read_adapter_config(path).base, base) for path in shipped_adapters())


def shipped_adapters() -> list[Path]:
    """Directories of the adapters that come with the package."""
    root = Path(str(files("tidar_core").joinpath("data", "adapters")))
    return sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}"))


def _check_supported(directory: Path, config: AdapterConfig) -> None:
    runs = {"kind": "low-rank", "slot_tokens": "mask"}
    for key, value in runs.items():
        if getattr(config, key) != value:
            stated = getattr(config, key)
            raise ConfigError(f"adapter {directory.name}: {key} {stated!r} is not supported yet, only {value!r} is")


def _misfits(made_for: BaseIdentity, base: BaseIdentity) -> list[str]:
    """Names of the fields in which an adapter's base differs from the model in a way that makes it unusable."""
    fields = [field for field in BaseIdentity.model_fields if field not in ("name", "fingerprint", "cuts")]
    return [field for field in fields if getattr(made_for, field) != getattr(base, field)]


def _strange(made_for: BaseIdentity, base: BaseIdentity) -> list[str]:
    """What differs from the model that the adapter was trained for, where that only costs drafts."""
    strange = ["other weights"] if made_for.fingerprint != base.fingerprint else []
    return [*strange, "other cuts of text into tokens"] if made_for.cuts not in ("", base.cuts) else strange


def _check_fit(directory: Path, made_for: BaseIdentity, base: BaseIdentity) -> None:
    misfits = _misfits(made_for, base)
    if misfits == ["tokenizer"]:
        raise ConfigError(f"adapter {directory.name} was made for another tokenizer than that of {base.name}")
    for field in misfits:
        if field != "tokenizer":
            theirs, ours = getattr(made_for, field), getattr(base, field)
            message = f"made for {made_for.name} with {field} {theirs}, {base.name} has {ours}"
            raise ConfigError(f"adapter {directory.name} does not fit: {message}")


def _expected_tensors(config: AdapterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mask_embedding", (config.block_length, config.base.hidden_size)
    for layer in range(config.base.layers):
        for projection in config.projections:
            if not config.adapts(layer, projection):
                continue
            a, b = config.base.pair_shapes(projection, config.rank)
            yield f"layers.{layer}.{projection}.A", a
            yield f"layers.{layer}.{projection}.B", b
    if config.slot_head:
        width, hidden = config.slot_head, config.base.hidden_size
        yield "slot_head.hidden", (width, hidden)
        yield "slot_head.token", (width, hidden)
        yield "slot_head.state", (width, width)
        yield "slot_head.out", (hidden, width)


def _check_tensors(path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{path} lacks the tensor {name}")
        if found[name] != shape:
            raise ConfigError(f"{path}: tensor {name} is {list(found[name])}, but {list(shape)} was expected")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ConfigError(f"{path} holds the tensor {unknown[0]}, which {CONFIG_FILE} does not speak of")


def _assemble(config: AdapterConfig, tensors: dict[str, Tensor]) -> AdapterWeights:
    def low_rank(layer: int, projection: Projection) -> LowRank | None:
        if not config.adapts(layer, projection):
            return None
        return LowRank(tensors[f"layers.{layer}.{projection}.A"], tensors[f"layers.{layer}.{projection}.B"])

    layers = tuple(
        LayerAdapter(**{projection: low_rank(layer, projection) for projection in PROJECTIONS})
        for layer in range(config.base.layers)
    )
    parts = {
        name.removeprefix("slot_head."): tensor for name, tensor in tensors.items() if name.startswith("slot_head.")
    }
    return AdapterWeights(tensors["mask_embedding"], layers, SlotHead(**parts) if parts else None)
