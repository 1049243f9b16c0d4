"""What crosses between ingress and replica: what a call wishes, what it is told, and how much of either."""

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from tidar_core.request import StepOutput

HEARTBEAT_SECONDS = 0.3  # a replica that has nothing to say says so as often
PROMPT_MARKS = 256  # that a call carries, in 2 kB: those of 360,448 tokens (`tidar_core.prefixes.mark_pages`)
PUBLISHED_MARKS = 1024  # that a replica tells of, in 8 kB, of all that it has cached (`PagePool.marks`)


@dataclass(frozen=True, slots=True)
class Route:
    """Names of replicas: `never` go there, `avoid` while there is another, `only` this one. `marks` of the call's
    prompt (`tidar_core.prefixes.prefix_marks`) draw it to where its prefix is cached. `moved`: it is for a stream that
    has begun elsewhere. `counted`: some replica has counted the call's prompt."""

    never: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    only: str | None = None
    marks: bytes = b""
    moved: bool = False
    counted: bool = False


ANYWHERE = Route()


@dataclass(frozen=True, slots=True)
class Address:
    """Where events are fetched: an ingress, by the name that its signs of life bear, and one of its mailboxes."""

    ingress: str
    mailbox: str


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What decides an engine's tokens: only between engines of one kind may a stream move once it has begun.
    fingerprint, identity: of its model (`tidar_core.model.fingerprint`)."""

    fingerprint: str
    identity: str
    dtype: str
    device: str
    arithmetic: str
    exact: bool
    mask_token: int | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """A replica's sign of life. max_model_len: positions that its memory has for one sequence, which may be fewer than
    another's."""

    replica: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class IngressCounts:
    """What an ingress has counted, as it tells the replicas with each sign of life. number: the later of two has the
    larger. series: written down once for all of them (`cluster.observe.ingress_metrics`)."""

    ingress: str
    number: int
    series: bytes


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """A replica's series for Prometheus, and what it was told by each ingress that it heard lately."""

    series: list[Metric]
    ingresses: tuple[IngressCounts, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """All that a request's own call says: who has it. max_model_len: as of `Alive`."""

    replica: str
    kind: EngineKind
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the engine will not serve: the client's fault, in one line."""

    request_id: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine broke; every request in flight ends here."""

    message: str


Event = StepOutput | Refusal | Failure


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a mailbox brings at once: the events since the last look (none in a heartbeat), and the replica's name."""

    replica: str
    events: tuple[Event, ...]
