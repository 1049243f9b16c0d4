"""What a replica counts for Prometheus: vLLM's names where vLLM has one, `tidar:` for the rest. Series of different
replicas differ in the label `engine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from tidar_core.request import FinishReason, StepOutput

if TYPE_CHECKING:  # it imports torch, which the engine's thread does first
    from tidar_core.engine import EngineStats

LABELS = ("model_name", "engine")
# vLLM's, and 2, which an alert asks for: a quantile is known to the bucket only.
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(slots=True)
class Timing:
    """When things happened to one request: seconds on one monotonic clock."""

    started: float
    prompt: int = 0  # tokens
    begun: float | None = None  # the first of its rows
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    prompt_counted: bool = False  # another replica was asked before, and has counted the prompt
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
        self._waiting = gauge(
            "vllm:num_requests_waiting", "Requests that wait for their turn, for room, or for their grammar."
        )
        self._cache = gauge("vllm:kv_cache_usage_perc", "K/V pages in use; 1 is all of them.")
        self._pages = gauge("tidar:kv_pages", "K/V pages in all.")
        self._preempted = counter(
            "vllm:num_preemptions", "How often a request gave its place back, to be computed again."
        ).labels(*labels)
        self._preemptions = 0
        self._prompt = counter(
            "vllm:prompt_tokens", "Prompt tokens received, for each choice anew, those of refused requests too."
        ).labels(*labels)
        self._looked_up = counter(
            "vllm:prefix_cache_queries", "Prompt tokens of requests that began to run, each once."
        ).labels(*labels)
        self._found = counter("vllm:prefix_cache_hits", "Those of them whose K/V were cached.").labels(*labels)
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
        self._decode_rows = counter("tidar:decode_rows", "Decode steps' rows, not of text read again.").labels(*labels)
        self._most_verified = max(1, block_length)
        self._step_rows = histogram("tidar:step_rows", "Rows of one forward pass, those of prompts too.", STEP_ROWS)
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival at the replica to the first token.", FIRST_TOKEN_SECONDS
        )
        self._queued = histogram(
            "vllm:request_queue_time_seconds", "From arrival at the replica to running there.", FIRST_TOKEN_SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From running there to the first token.", FIRST_TOKEN_SECONDS
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "From one step's tokens of a request to the next's.", TOKEN_SECONDS
        )
        self._each = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time a token after the first.", TOKEN_SECONDS
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end, of what was not aborted.", REQUEST_SECONDS
        )
        self._in_vain = histogram(
            "tidar:aborted_without_token_seconds",
            "From arrival to the end of what was aborted before a token: its client left, or another replica had it.",
            FIRST_TOKEN_SECONDS,
        )

    def arrived(self, timing: Timing) -> None:
        if not timing.prompt_counted:
            self._prompt.inc(timing.prompt)

    def begun(self, timing: Timing, since: float) -> None:
        """Count the wait of a request that runs."""
        timing.begun = since
        self._queued.observe(since - timing.started)

    def stepped(self, output: StepOutput, timing: Timing, now: float) -> None:
        """Count what one step brought one request; the answer's end is `ended`'s."""
        self._generated.inc(len(output.tokens))
        if output.tokens:
            if timing.last_token is None:
                timing.first_token = now
                if not timing.resumed:
                    self._first.observe(now - timing.started)
                    if timing.begun is not None:
                        self._prefill.observe(now - timing.begun)
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
            if not timing.prompt_counted:
                self._looked_up.inc(timing.prompt)
                self._found.inc(trace.cached)
            return
        self._steps.inc()
        self._stepped.inc(len(output.tokens))
        # More verify rows than a block has places: a preemption or a handover left text to be read again.
        reads = trace.verify_rows > self._most_verified
        self._decode_rows.inc((1 + len(trace.drafted) if reads else trace.verify_rows) + trace.mask_rows)
        if trace.drafted:
            self._drafts.inc()
            self._drafted.inc(len(trace.drafted))
            self._accepted.inc(trace.accepted)
            for place in self._by_position[: trace.accepted]:
                place.inc()

    def passed(self, rows: int) -> None:
        """Count one forward pass, whether it brought anything or only read of prompts."""
        self._step_rows.observe(rows)

    def ended(self, reason: FinishReason, timing: Timing, now: float) -> None:
        """Count the end of a request, an aborted one too."""
        self._finished[reason].inc()
        if reason is not FinishReason.ABORT:
            self._whole.observe(now - timing.started)
        elif timing.first_token is None and not timing.resumed:
            self._in_vain.observe(now - timing.started)
        if timing.first_token is not None and timing.tokens > 1:
            self._each.observe((now - timing.first_token) / (timing.tokens - 1))

    def collect(self, stats: "EngineStats") -> list[Metric]:
        """All series of this replica, with its engine's load at this moment."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._cache.set(stats.pages_used / stats.pages_total if stats.pages_total else 0.0)
        self._pages.set(stats.pages_total)
        self._preempted.inc(stats.preemptions - self._preemptions)
        self._preemptions = stats.preemptions
        return list(self._registry.collect())
