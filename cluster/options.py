"""What a user chooses about what is served. Imports nothing heavy: the command line reads it before it starts Ray."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tidar_core.config import DEFAULT_MODEL, Device, EngineConfig, GenerationConfig, KVDType, RoundedDType, ServedDType
from tidar_core.model.sources import cached_as
from tidar_core.request import DraftMode

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Place = Annotated[str, Field(min_length=1)]
Drafts = Annotated[
    DraftMode, BeforeValidator(lambda given: "off" if given is False else given)
]  # off, as YAML reads it

# As a browser states it: without a path, and in lower case.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")


class FurtherModel(BaseModel):
    """Another base beside the first, on engines of its own. What is left out (None) is as with the first.

    model, adapter, dtype, kv_dtype, drafts, max_model_len, max_running, cache_tokens, generation_config: as in
    `tidar_core.config.EngineConfig`.
    replicas: engines, always so many.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Place
    adapter: Place = "default"
    dtype: ServedDType | None = None
    kv_dtype: KVDType | None = None
    drafts: Drafts | None = None
    max_model_len: Count | None = None
    max_running: Positive | None = None
    cache_tokens: Count | None = None
    generation_config: GenerationConfig | None = None
    replicas: Positive | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is behind one name: how each of its engines is set up, and how many there are, or where `max_replicas` is
    given how many there may be. device and threads are those that were asked for, not yet those of a cluster."""

    config: EngineConfig
    engines: int


ONLY_ASLEEP = ("downscale_to_zero_delay_s", "wake_seconds")  # options that say nothing of a model that never sleeps


class ServeOptions(BaseModel):
    """The models behind the API; also the `args` of the application builder in a Serve config file.

    model, adapter, dtype, kv_dtype, device, drafts, max_model_len, max_running, cache_tokens, generation_config: as in
    `tidar_core.config.EngineConfig`.
    adapters: further adapters of the same base by the names that requests ask for them with, each served by engines of
    its own, as many as the first has.
    models: further bases by such names, each with its adapter and engines (`FurtherModel`). What is not said there, and
    device, threads, exact, graphs, overlap_steps, accelerator and how engines follow the load, is common to all.
    name: what clients call the model; by default the last part of its path, or its hub id.
    replicas: engines, always so many. min_replicas, max_replicas: instead of it, as many between these as the load
    wants (`cluster.autoscaling`); 0 lets the model sleep while nobody asks, and the first request wakes it.
    target_ongoing_requests: answers that each replica shall have under way then; None for as many as fill its batch or
    its K/V pages. upscale_delay_s, downscale_delay_s, downscale_to_zero_delay_s: how long the load must want it.
    wake_seconds: how long a request may wait for a model that sleeps.
    accelerator: the kind of GPU that each needs, by Ray's name for it ("H100"); None for any.
    reasoning: tell what a model thinks before it answers apart from the answer in chats; else it stands in the text.
    exact, graphs, overlap_steps: as in `EngineConfig`, for GPUs.
    threads: CPU threads of each, 0 for an equal share of the node's CPUs.
    max_ongoing: answers that an ingress has under way for each replica, running or waiting; requests beyond that are
    answered 429. max_body_bytes: largest request body.
    priorities: requests may go before others by their `priority`, which takes the places of those that run; for servers
    all of whose callers may.
    ingresses: processes that take requests in. chunk_rate: chunks a second that each of them sends, all streams
    together: where there were more, steps of a stream share one, though none is held back for more than 0.25 s; 0 for a
    rate that suits the engines' device. A stream whose steps are traced gets them one by one.
    start_retries: a deployment is given up once so many starts of its engines have failed, or three times as many as it
    shall have (Serve's `RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT`). A fleet wants more than the 2 that tell a wrong model
    soon: a node that is lost while an engine starts there takes two of them.
    stall_seconds: a replica that gives no sign of life for so long under a stream loses it to another, if one is there.
    carry_seconds: how long a stream may be without any replica, or at one that is the only one and gives no sign of
    life, before it is given up.
    api_keys, metrics_keys: files with keys, one a line, on every node that runs an ingress (`cluster.ingress.auth`).
    cors_origins: web sites ("https://chat.example.org") whose scripts may use the API from a browser; "*" for all.
    traces: the collector that OpenTelemetry spans of requests go to by OTLP over HTTP ("http://collector:4318").
    playground: it is an application beside this one, and `/` leads there; else `/` says where the API is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Place = DEFAULT_MODEL
    adapter: Place = "default"
    adapters: dict[str, str] = Field(default_factory=dict)
    models: dict[str, FurtherModel] = Field(default_factory=dict)
    name: str | None = None
    dtype: ServedDType = "bfloat16"
    kv_dtype: KVDType = "model"
    device: Device = "auto"
    drafts: Drafts = "auto"
    replicas: int = 1
    min_replicas: Count = 1
    max_replicas: Positive | None = None
    target_ongoing_requests: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    upscale_delay_s: Seconds = 3.0
    downscale_delay_s: Seconds = 300.0
    downscale_to_zero_delay_s: Seconds = 900.0
    wake_seconds: Seconds = 300.0
    accelerator: str | None = None
    reasoning: bool = True
    exact: bool = True
    graphs: bool = True
    overlap_steps: bool | None = None
    threads: Count = 0
    max_model_len: Count = 0
    max_running: Positive = EngineConfig().max_running
    cache_tokens: Count = 0
    generation_config: GenerationConfig = "auto"
    max_ongoing: Positive = 1024
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    priorities: bool = False
    ingresses: Positive = 1
    chunk_rate: Count = 0
    start_retries: Positive = 2
    stall_seconds: Annotated[float, Field(ge=0.5, allow_inf_nan=False)] = 1.5
    carry_seconds: Seconds = 60.0
    api_keys: str | None = None
    metrics_keys: str | None = None
    cors_origins: tuple[str, ...] = ()
    traces: str | None = None
    playground: bool = True

    @field_validator("traces")
    @classmethod
    def _a_collector_that_can_be_asked(cls, collector: str | None) -> str | None:
        if collector is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", collector):
            raise ValueError(f"{collector!r} is no collector's address: write it as http://collector:4318")
        return collector

    @field_validator("cors_origins")
    @classmethod
    def _origins_as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: write scheme, host and port alone, as https://example.org")
        return origins

    @field_validator("adapters", "models")
    @classmethod
    def _names_for_requests(cls, named: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in named:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name for a model: use letters, digits and . _ - / :")
        return named

    @field_validator("replicas")
    @classmethod
    def _some_replica(cls, replicas: int) -> int:
        if replicas < 1:
            raise ValueError("a model that may sleep has min_replicas 0 and max_replicas; else set 1 or more")
        return replicas

    @model_validator(mode="after")
    def _one_way_to_say_how_many(self) -> Self:
        counts = {"replicas": self.replicas != 1}
        counts |= {f"models.{name}.replicas": further.replicas is not None for name, further in self.models.items()}
        stated = [place for place, given in counts.items() if given]
        unused = [name for name, value in self._scaling.items() if value != type(self).model_fields[name].default]
        if self.max_replicas is None:
            if unused:
                raise ValueError(f"{unused[0]} needs max_replicas; without it there are always `replicas` engines")
        elif self.min_replicas and (sleeping := [name for name in unused if name in ONLY_ASLEEP]):
            raise ValueError(f"{sleeping[0]} needs min_replicas 0; with {self.min_replicas} the model never sleeps")
        elif stated:
            raise ValueError(
                f"{stated[0]} and max_replicas both say how many engines there are; leave one of the two out"
            )
        elif self.max_replicas < self.min_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        return self

    @model_validator(mode="after")
    def _one_model_for_a_name(self) -> Self:
        others = [*self.adapters, *self.models]
        if self.served_name in others:
            raise ValueError(f"{self.served_name} is the name of the model itself; give the others other names")
        for name in self.models:
            if name in self.adapters:
                raise ValueError(f"{name} is in adapters and in models; give one of the two another name")
        if len({deployment_part(name) for name in others}) < len(others):
            raise ValueError("two names differ by / and - alone; make them differ more")
        return self

    @model_validator(mode="after")
    def _a_gpu_to_be_of_a_kind(self) -> Self:
        if self.accelerator is not None and self.device == "cpu":
            raise ValueError(f"accelerator {self.accelerator} is a GPU, but device is cpu; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _rounded_where_it_runs(self) -> Self:
        stated = {"": self.dtype} | {f"models.{name}: ": further.dtype for name, further in self.models.items()}
        for where, dtype in stated.items():
            if dtype in get_args(RoundedDType) and (self.device == "cuda" or self.accelerator is not None):
                raise ValueError(f"{where}dtype {dtype} is for CPUs; use bfloat16 or float8 on a GPU")
        return self

    @property
    def _scaling(self) -> dict[str, float | None]:
        return {
            "min_replicas": self.min_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "downscale_to_zero_delay_s": self.downscale_to_zero_delay_s,
            "wake_seconds": self.wake_seconds,
        }

    @property
    def served(self) -> dict[str, ServedModel]:
        """What is behind every name that requests may ask for, the first model's own name first."""
        config = EngineConfig(
            model=self.model,
            adapter=self.adapter,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            threads=self.threads,
            drafts=self.drafts,
            max_model_len=self.max_model_len,
            max_running=self.max_running,
            cache_tokens=self.cache_tokens,
            generation_config=self.generation_config,
            exact=self.exact,
            graphs=self.graphs,
            overlap_steps=self.overlap_steps,
        )
        first = ServedModel(config, self.max_replicas or self.replicas)
        found = {self.served_name: first}
        for name, adapter in self.adapters.items():
            found[name] = replace(first, config=replace(config, adapter=adapter))
        for name, further in self.models.items():
            stated = further.model_dump(exclude={"replicas"}, exclude_none=True)
            found[name] = ServedModel(replace(config, **stated), further.replicas or first.engines)
        return found

    @property
    def most_engines(self) -> int:
        """Engines that there may be, of all names together."""
        return sum(served.engines for served in self.served.values())

    @property
    def most_ongoing(self) -> int:
        """Answers that all ingresses together have under way at the most."""
        return self.ingresses * self.max_ongoing * self.most_engines

    @property
    def sleeps(self) -> bool:
        """Whether there may be no replica because nobody asks."""
        return self.max_replicas is not None and self.min_replicas == 0

    @property
    def served_name(self) -> str:
        """The first model's name on the wire. A path from the root or from home on gives one whether it is there or
        not: it may be there for the engines alone, and not for whoever builds the application."""
        if self.name:
            return self.name
        if not (self.model.startswith(("/", "~")) or os.path.exists(self.model)):
            return self.model
        last = Path(os.path.abspath(self.model))
        return (last.stem if last.suffix == ".gguf" else cached_as(last) or last.name) or self.model


def deployment_part(name: str) -> str:
    """A model's name as part of a deployment's, which may hold no slash."""
    return name.replace("/", "-")


class UpOptions(BaseModel):
    """What `tidar up` takes: what to serve, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    serve: ServeOptions = ServeOptions()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
