"""What an ingress counts for Prometheus, and the one page that any ingress shows: its own counts, those of all
replicas, and those of the other ingresses, which tell them to the replicas with each sign of life.

A scrape of one address reaches an ingress by chance. Did the page show that one's counts alone, the series of each
would have gaps, rates would miss most of what happens, and an ingress that fails might never be seen to.
"""

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.line import IngressCounts
from cluster.observe.replica_metrics import FIRST_TOKEN_SECONDS

GAP_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
LATELY_SECONDS = 0.5
# Why streams go on elsewhere. Prometheus counts no increase where a series first appears: these stand at 0 before.
USUAL_CAUSES = (
    *("silent", "quiet", "aborted", "failed", "refused", "ended early", "call failed", "engine failed"),
    *("cancelled by the server", "ActorDiedError", "ActorUnavailableError", "AioRpcError", "RequestCancelledError"),
)
# What clients get, of a model and where their request names none that is there; at 0 before for the same reason.
USUAL_CODES = ("200", "400", "429", "499", "500", "503")
USUAL_REFUSALS = ("400", "401", "404", "413", "415", "499", "500")


class Watched(Protocol):
    """What is behind a name that requests may ask for. sleeps: there is no engine because nobody asks. most_answers:
    how many may be under way at once."""

    @property
    def engines(self) -> int: ...
    @property
    def engines_wanted(self) -> int: ...
    @property
    def sleeps(self) -> bool: ...
    @property
    def most_answers(self) -> int: ...


class IngressMetrics:
    """Counts of one ingress since it started: what happened to streams between replicas, what clients got, and how
    long they waited; and how many engines it knows for each name, which no replica could tell where there is none."""

    def __init__(self, ingress: str):
        self._registry = CollectorRegistry(auto_describe=False)
        self._handovers = Counter(
            "tidar:stream_handovers", "Requests that went on at another replica.",
            ("model_name", "ingress", "cause"), registry=self._registry,
        )  # fmt: skip
        self._gaps = Histogram(
            "tidar:stream_handover_seconds",
            "From losing a replica to being accepted by the next, or from calling the next where that came before.",
            ("model_name", "ingress"), buckets=GAP_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._rivals = Counter(
            "tidar:stream_rivals", "Requests that were begun at a second replica while theirs was quiet.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._engines = Gauge(
            "tidar:engines_ready", "Engines that answer this ingress, for each name that is served.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._wanted = Gauge(
            "tidar:engines_wanted",
            "Engines that there shall be, or be at least where they follow the load; 0 where Serve has not said.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._sleeps = Gauge(
            "tidar:model_sleeps",
            "1 while there is no engine because nobody asks; 0 also where none comes in the time that requests have.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._in_progress = Gauge(
            "tidar:requests_in_progress",
            "POSTs that are not answered to the end, also what waits to be tokenized or for a model to wake; "
            "without a model until it is known.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._limit = Gauge(
            "tidar:requests_limit",
            "Answers that may be under way at once, each choice for one; requests beyond that get 429.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._first = Histogram(
            "tidar:http_first_token_seconds",
            "From having all of a request at the ingress to its first token there, or to its client's leaving before.",
            ("model_name", "ingress"), buckets=FIRST_TOKEN_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._responses = Counter(
            "tidar:http_responses",
            "Answers to POSTs by status; a stream that broke off has that of its error, one whose client left has 499.",
            ("model_name", "ingress", "code"), registry=self._registry,
        )  # fmt: skip
        for code in USUAL_REFUSALS:
            self._responses.labels("", ingress, code)
        self._in_progress.labels("", ingress)
        self._ingress, self._tellings = ingress, 0
        self._told: tuple[float, IngressCounts] | None = None

    def watch(self, model: str, watched: Watched) -> None:
        """Tell of a name that requests may ask for, from now on."""
        self._engines.labels(model, self._ingress).set_function(lambda: watched.engines)
        self._wanted.labels(model, self._ingress).set_function(lambda: watched.engines_wanted)
        self._sleeps.labels(model, self._ingress).set_function(lambda: watched.sleeps)
        self._limit.labels(model, self._ingress).set_function(lambda: watched.most_answers)
        self._in_progress.labels(model, self._ingress)
        self._first.labels(model, self._ingress)
        for code in USUAL_CODES:
            self._responses.labels(model, self._ingress, code)

    def begun(self) -> None:
        """Count a request as one in progress, of no model yet."""
        self._in_progress.labels("", self._ingress).inc()

    def goes_over(self, before: str, model: str) -> None:
        """A request that was counted for one model is for another."""
        self._in_progress.labels(before, self._ingress).dec()
        self._in_progress.labels(model, self._ingress).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """Count how long a client waited, though it left."""
        self._first.labels(model, self._ingress).observe(seconds)

    def answered(self, model: str, status: int) -> None:
        """Count what the client of a request in progress got; no model where it ended before one was found."""
        self._in_progress.labels(model, self._ingress).dec()
        self._responses.labels(model, self._ingress, str(status)).inc()

    def streams_of(self, model: str) -> "StreamCounts":
        """What counts the streams of one name."""
        for cause in USUAL_CAUSES:
            self._handovers.labels(model, self._ingress, cause)
        own = model, self._ingress
        return StreamCounts(partial(self._handovers.labels, *own), self._gaps.labels(*own), self._rivals.labels(*own))

    def collect(self) -> list[Metric]:
        return list(self._registry.collect())

    def told(self) -> IngressCounts:
        """What is counted by now, for replicas to pass on."""
        self._tellings += 1
        return IngressCounts(self._ingress, self._tellings, pickle.dumps([shown(family) for family in self.collect()]))

    def told_lately(self) -> IngressCounts:
        """As `told`, of now or a moment ago: who looks for the engines of each name asks by itself, and what is told
        grows with the names."""
        now = time.monotonic()
        if self._told is None or now - self._told[0] > LATELY_SECONDS:
            self._told = now, self.told()
        return self._told[1]

    def of_others(self, passed_on: Iterable[IngressCounts]) -> list[list[Metric]]:
        """The series of each other ingress, as it told them last: every replica passes on what it heard."""
        latest: dict[str, IngressCounts] = {}
        for counts in passed_on:
            known = latest.setdefault(counts.ingress, counts)
            if counts.number > known.number:
                latest[counts.ingress] = counts
        return [pickle.loads(counts.series) for name, counts in latest.items() if name != self._ingress]


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """What happens to the streams of one name between replicas. handovers: by their cause."""

    handovers: Callable[[str], Counter]
    gaps: Histogram
    rivals: Counter

    def handed_over(self, cause: str, seconds: float) -> None:
        self.handovers(cause).inc()
        self.gaps.observe(seconds)

    def rival_begun(self) -> None:
        self.rivals.inc()


class Merged(Collector):
    """Series of several processes as one page: a family's name, type and help stand once."""

    def __init__(self, parts: Iterable[Iterable[Metric]]):
        self._parts = list(parts)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._parts:
            for metric in metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples.extend(shown(metric).samples)
        yield from families.values()


def shown(family: Metric) -> Metric:
    """A family without the times at which its series began."""
    found = Metric(family.name, family.documentation, family.type)
    found.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return found


def render(parts: Iterable[Iterable[Metric]]) -> bytes:
    """Prometheus' text format of what the `collect` of replicas and an ingress gave."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(parts))
    return generate_latest(registry)
