"""What a user chooses about a served model. Imports nothing heavy: the command line reads it before it starts Ray."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tidar_core.config import DEFAULT_MODEL, EngineConfig, ServedDType
from tidar_core.request import DraftMode

Count = Annotated[int, Field(ge=0)]


class ServeOptions(BaseModel):
    """One model behind the API; also the `args` of the application builder in a Serve config file.

    model, adapter, dtype, device, drafts, max_model_len: as in `tidar_core.config.EngineConfig`.
    name: what clients call the model; by default the last part of its path, or its hub id.
    replicas: engines. accelerator: the kind of GPU that each needs, by Ray's name for it ("H100"); None for any.
    threads: CPU threads of each, 0 for an equal share of the node's CPUs.
    max_ongoing: answers that an ingress has under way for each replica, running or waiting; requests beyond that are
    answered 429. max_body_bytes: largest request body.
    stall_seconds: a replica that gives no sign of life for so long under a stream loses it to another.
    carry_seconds: how long a stream may be without any replica before it is given up.
    api_keys, metrics_keys: files with keys, one a line, on every node that runs an ingress (see `cluster.auth`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = DEFAULT_MODEL
    adapter: str = "default"
    name: str | None = None
    dtype: ServedDType = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    drafts: DraftMode = "auto"
    replicas: int = 1
    accelerator: str | None = None
    threads: Count = 0
    max_model_len: Count = 0
    max_ongoing: Annotated[int, Field(ge=1)] = 256
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    stall_seconds: Annotated[float, Field(ge=0.5)] = 1.5
    carry_seconds: Annotated[float, Field(ge=0.0)] = 60.0
    api_keys: str | None = None
    metrics_keys: str | None = None

    @field_validator("replicas")
    @classmethod
    def _some_replica(cls, replicas: int) -> int:
        if replicas < 1:
            raise ValueError("nothing here wakes a model from zero replicas; set 1 or more")
        return replicas

    @model_validator(mode="after")
    def _a_gpu_to_be_of_a_kind(self) -> Self:
        if self.accelerator is not None and self.device == "cpu":
            raise ValueError(f"accelerator {self.accelerator} is a GPU, but device is cpu; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _int8_where_it_runs(self) -> Self:
        if self.dtype == "int8" and (self.device == "cuda" or self.accelerator is not None):
            raise ValueError("dtype int8 is for CPUs; use bfloat16 on a GPU")
        return self

    @property
    def served_name(self) -> str:
        """The model's name on the wire."""
        if self.name:
            return self.name
        path = Path(self.model)
        return (path.stem if path.is_file() else path.resolve().name) if path.exists() else self.model

    def engine_config(self, device: Literal["auto", "cpu", "cuda"], threads: int) -> EngineConfig:
        """The engine's own settings, on a device and with a number of CPU threads."""
        return EngineConfig(
            model=self.model,
            adapter=self.adapter,
            dtype=self.dtype,
            device=device,
            threads=threads,
            drafts=self.drafts,
            max_model_len=self.max_model_len,
        )


class UpOptions(BaseModel):
    """What `tidar up` takes: a model to serve, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    serve: ServeOptions = ServeOptions()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
