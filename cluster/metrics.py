"""What Prometheus reads: vLLM's names where vLLM has one, `tidar:` for the rest.

Each replica counts for itself (`ReplicaMetrics`), so that any ingress can show all of them on one page (`render`):
series of different replicas differ in the label `engine`. What an ingress counts itself (`IngressMetrics`) it adds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tidar_core.request import FinishReason, StepOutput

if TYPE_CHECKING:  # as for `Engine`: it imports torch
    from tidar_core.engine import EngineStats

LABELS = ("model_name", "engine")
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Why streams go on elsewhere. Prometheus counts no increase where a series first appears: these stand at 0 before.
USUAL_CAUSES = (
    *("silent", "quiet", "aborted", "failed", "refused", "ended early", "call failed", "engine failed"),
    *("cancelled by the server", "ActorDiedError", "ActorUnavailableError", "AioRpcError", "RequestCancelledError"),
)
# What clients get, of a model and where their request names none that is there; at 0 before for the same reason.
USUAL_CODES = ("200", "400", "429", "500", "503")
USUAL_REFUSALS = ("400", "401", "404", "413", "415", "500")
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(slots=True)
class Timing:
    """When things happened to one request: seconds on one monotonic clock."""

    started: float
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    again: bool = False  # another replica was asked before, and has counted the prompt
    resumed: bool = False  # the first token was another replica's


class ReplicaMetrics:
    """Counts of one replica since it started. `block_length` is the drafter's."""

    def __init__(self, model: str, replica: str, block_length: int):
        self._registry = CollectorRegistry(auto_describe=False)
        labels = (model, replica)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*LABELS, *more), registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, LABELS, registry=self._registry).labels(*labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*labels)

        self._running = gauge("vllm:num_requests_running", "Requests in the batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting for room in the batch.")
        self._cache = gauge("vllm:kv_cache_usage_perc", "K/V pages in use; 1 is all of them.")
        self._pages = gauge("tidar:kv_pages", "K/V pages in all.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens received.").labels(*labels)
        self._generated = counter("vllm:generation_tokens", "Tokens emitted.").labels(*labels)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Steps that verified drafts.").labels(*labels)
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.").labels(*labels)
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts that held.").labels(*labels)
        by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that held, by place in the draft.", "position"
        )
        self._by_position = [by_position.labels(*labels, str(place)) for place in range(max(0, block_length - 1))]
        finished = counter("vllm:request_success", "Requests that ended, by how.", "finished_reason")
        self._finished = {reason: finished.labels(*labels, reason.value) for reason in FinishReason}
        self._steps = counter("tidar:decode_steps", "Decode steps, counted for each sequence.").labels(*labels)
        self._stepped = counter("tidar:decode_tokens", "Tokens that decode steps emitted.").labels(*labels)
        rows = counter("tidar:rows", "Rows that the model computed in steps that emitted, by kind.", "kind")
        self._verify_rows, self._mask_rows = (rows.labels(*labels, kind) for kind in ("verify", "mask"))
        self._step_rows = histogram(
            "tidar:step_rows", "Rows of one forward pass, of all requests that it served.", STEP_ROWS
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival at the replica to the first token.", FIRST_TOKEN_SECONDS
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "From one step's tokens of a request to the next's.", TOKEN_SECONDS
        )
        self._each = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time a token after the first.", TOKEN_SECONDS
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS)

    def arrived(self, prompt_tokens: int, timing: Timing) -> None:
        if not timing.again:
            self._prompt.inc(prompt_tokens)

    def stepped(self, output: StepOutput, timing: Timing, now: float) -> None:
        """Count what one step brought one request; the answer's end is `ended`'s."""
        self._generated.inc(len(output.tokens))
        if output.tokens:
            if timing.last_token is None:
                timing.first_token = now
                if not timing.resumed:
                    self._first.observe(now - timing.started)
            else:
                self._between.observe(now - timing.last_token)
            timing.last_token = now
        timing.tokens += len(output.tokens)
        trace = output.trace
        if trace is None:
            return
        self._verify_rows.inc(trace.verify_rows)
        self._mask_rows.inc(trace.mask_rows)
        if trace.step == 0:
            return
        self._steps.inc()
        self._stepped.inc(len(output.tokens))
        if trace.drafted:
            self._drafts.inc()
            self._drafted.inc(len(trace.drafted))
            self._accepted.inc(trace.accepted)
            for place in self._by_position[: trace.accepted]:
                place.inc()

    def passed(self, outputs: Iterable[StepOutput]) -> None:
        """Count one forward pass by the rows that it computed for all that it brought."""
        rows = sum(output.trace.verify_rows + output.trace.mask_rows for output in outputs if output.trace is not None)
        if rows:
            self._step_rows.observe(rows)

    def ended(self, reason: FinishReason, timing: Timing, now: float) -> None:
        """Count the end of a request, an aborted one too."""
        self._finished[reason].inc()
        self._whole.observe(now - timing.started)
        if timing.first_token is not None and timing.tokens > 1:
            self._each.observe((now - timing.first_token) / (timing.tokens - 1))

    def collect(self, stats: "EngineStats") -> list[Metric]:
        """All series of this replica, with its engine's load at this moment."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._cache.set(stats.pages_used / stats.pages_total if stats.pages_total else 0.0)
        self._pages.set(stats.pages_total)
        return list(self._registry.collect())


class IngressMetrics:
    """Counts of one ingress since it started: what happened to streams between replicas, what clients got; and how
    many engines it knows for each name, which no replica could tell where there is none."""

    def __init__(self, ingress: str):
        self._registry = CollectorRegistry(auto_describe=False)
        self._handovers = Counter(
            "tidar:stream_handovers", "Requests that went on at another replica.", ("ingress", "cause"),
            registry=self._registry,
        )  # fmt: skip
        for cause in USUAL_CAUSES:
            self._handovers.labels(ingress, cause)
        self._gaps = Histogram(
            "tidar:stream_handover_seconds",
            "From losing a replica to being accepted by the next, or from calling the next where that came before.",
            ("ingress",), buckets=FIRST_TOKEN_SECONDS, registry=self._registry,
        ).labels(ingress)  # fmt: skip
        self._rivals = Counter(
            "tidar:stream_rivals", "Requests that were begun at a second replica while theirs was quiet.",
            ("ingress",), registry=self._registry,
        ).labels(ingress)  # fmt: skip
        self._engines = Gauge(
            "tidar:engines_ready", "Engines that answer this ingress, for each name that is served.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._sleeps = Gauge(
            "tidar:model_sleeps", "1 where there may be no engine because nobody asks, else 0.",
            ("model_name", "ingress"), registry=self._registry,
        )  # fmt: skip
        self._responses = Counter(
            "tidar:http_responses", "Answers to POSTs by status; a stream that broke off has that of its error.",
            ("model_name", "ingress", "code"), registry=self._registry,
        )  # fmt: skip
        for code in USUAL_REFUSALS:
            self._responses.labels("", ingress, code)
        self._ingress = ingress

    def watch(self, model: str, engines: Callable[[], int], sleeps: bool) -> None:
        """Tell of a name that requests may ask for, from now on."""
        self._engines.labels(model, self._ingress).set_function(engines)
        self._sleeps.labels(model, self._ingress).set(sleeps)
        for code in USUAL_CODES:
            self._responses.labels(model, self._ingress, code)

    def answered(self, model: str, status: int) -> None:
        """Count what a client got; no model where its request was refused before one was found."""
        self._responses.labels(model, self._ingress, str(status)).inc()

    def handed_over(self, cause: str, seconds: float) -> None:
        self._handovers.labels(self._ingress, cause).inc()
        self._gaps.observe(seconds)

    def rival_begun(self) -> None:
        self._rivals.inc()

    def collect(self) -> list[Metric]:
        return list(self._registry.collect())


class Merged(Collector):
    """Series of several processes as one page: a family's name, type and help stand once."""

    def __init__(self, parts: Iterable[Iterable[Metric]]):
        self._parts = list(parts)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._parts:
            for metric in metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples.extend(item for item in metric.samples if not item.name.endswith("_created"))
        yield from families.values()


def render(parts: Iterable[Iterable[Metric]]) -> bytes:
    """Prometheus' text format of what the `collect` of replicas and an ingress gave."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(parts))
    return generate_latest(registry)
