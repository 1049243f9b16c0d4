"""A server as a platform runs it: keys, another site's origin, a model whose template has tools, another beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.options import FurtherModel, ServeOptions
from tests.servers import Server, running, start_with
from tests.tiny import (
    HERMES_TEMPLATE,
    edit_json,
    thinking_tokenizer,
    tiny_adapter,
    tiny_checkpoint,
    tool_tokenizer,
    with_many_words,
)

ORIGIN = "https://chat.example.org"
KEYS = ("key-of-one", "key-of-another")


@dataclass(frozen=True)
class Guarded:
    """The server, what it was started with, two keys for its API and one for its metrics."""

    server: Server
    options: ServeOptions
    key: str = KEYS[0]
    other_key: str = KEYS[1]
    plain: str = "tiny/plain"  # the same model without a drafter
    beside: str = "org/qwen"  # another architecture, vocabulary and drafter, thoughts, and makers who say how to sample
    metrics_key: str = "key-of-metrics"

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


@contextmanager
def guarded_server(directory: Path, traces: str | None = None) -> Iterator[Guarded]:
    """The server; `traces` is the address of a collector."""
    model = tiny_checkpoint(directory / "tiny", max_positions=2048)
    tool_tokenizer(HERMES_TEMPLATE).save_pretrained(model)
    adapter = tiny_adapter(directory / "adapter", model)
    beside = tiny_checkpoint(directory / "qwen", "qwen2", seed=1, vocab=400)
    thinking_tokenizer(400).save_pretrained(beside)
    with_many_words(beside)  # pickled it is larger than what gRPC, by which a replica sends it, takes at once by itself
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    edit_json(beside / "generation_config.json", **wanted)
    beside_adapter = tiny_adapter(directory / "qwen-adapter", beside, block_length=3)
    (directory / "keys").write_text("\n".join(KEYS))
    (directory / "metrics").write_text(Guarded.metrics_key)
    options = ServeOptions(
        model=str(model),
        adapter=str(adapter),
        adapters={Guarded.plain: "none"},
        models={Guarded.beside: FurtherModel(model=str(beside), adapter=str(beside_adapter), max_model_len=512)},
        name="tiny",
        dtype="float32",
        device="cpu",
        api_keys=str(directory / "keys"),
        metrics_keys=str(directory / "metrics"),
        cors_origins=(ORIGIN,),
        traces=traces,
    )
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # milliseconds
    with running(start_with(directory, options, cpus=options.most_engines, more=soon, playground=True)) as server:
        yield Guarded(server, options)
