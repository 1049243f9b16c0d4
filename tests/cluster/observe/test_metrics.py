"""What a replica counts, and several replicas on one page."""

import pickle
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from cluster.observe.ingress_metrics import IngressMetrics, render
from cluster.observe.replica_metrics import ReplicaMetrics, Timing
from cluster.operate.status import Snapshot, read_page, replica_table
from tests.cluster.observe.behind import Behind
from tests.cluster.wire.test_acceptance import step
from tidar_core.engine import EngineStats
from tidar_core.request import FinishReason


def counted(replica: str) -> ReplicaMetrics:
    metrics = ReplicaMetrics("tiny", replica, block_length=4)
    timing = Timing(started=10.0, prompt=5)
    metrics.arrived(timing)
    metrics.begun(timing, since=10.125)
    for number, (drafted, accepted) in enumerate([(0, 0), (3, 2), (3, 0), (1, 1)]):
        output = step(number, drafted, accepted, cached=4 if number == 0 else 0)
        assert output.trace is not None
        metrics.passed(output.trace.verify_rows + output.trace.mask_rows)
        metrics.stepped(output, timing, now=10.5 + number)
    metrics.ended(FinishReason.LENGTH, timing, now=14.0)
    metrics.ended(FinishReason.ABORT, Timing(started=10.0), now=11.0)
    return metrics


def test_names_and_values_are_vllms() -> None:
    stats = EngineStats(running=2, waiting=1, pages_used=3, pages_total=12, preemptions=6)
    replica = counted("r1")
    replica.collect(replace(stats, preemptions=4))  # a scrape before
    page = render([replica.collect(stats)]).decode()
    values = {
        (
            sample.name,
            next((sample.labels[key] for key in ("position", "finished_reason", "kind") if key in sample.labels), ""),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    expected = {
        ("vllm:num_requests_running", ""): 2,
        ("vllm:num_requests_waiting", ""): 1,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:num_preemptions_total", ""): 6,
        ("vllm:prompt_tokens_total", ""): 5,
        ("vllm:prefix_cache_queries_total", ""): 5,
        ("vllm:prefix_cache_hits_total", ""): 4,
        ("vllm:generation_tokens_total", ""): 7,
        ("vllm:spec_decode_num_drafts_total", ""): 3,
        ("vllm:spec_decode_num_draft_tokens_total", ""): 7,
        ("vllm:spec_decode_num_accepted_tokens_total", ""): 3,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:request_success_total", "abort"): 1,
        ("vllm:time_to_first_token_seconds_sum", ""): 0.5,
        ("vllm:time_to_first_token_seconds_count", ""): 1,
        ("vllm:request_queue_time_seconds_sum", ""): 0.125,
        ("vllm:request_prefill_time_seconds_sum", ""): 0.375,
        ("vllm:inter_token_latency_seconds_sum", ""): 3,
        ("vllm:inter_token_latency_seconds_count", ""): 3,
        ("tidar:step_rows_count", ""): 4,
        ("tidar:step_rows_sum", ""): sum(values[("tidar:rows_total", kind)] for kind in ("verify", "mask")),
        ("vllm:e2e_request_latency_seconds_sum", ""): 4,
        ("vllm:e2e_request_latency_seconds_count", ""): 1,
        ("tidar:aborted_without_token_seconds_sum", ""): 1,
        ("tidar:aborted_without_token_seconds_count", ""): 1,
        ("vllm:request_time_per_output_token_seconds_sum", ""): 3.5 / 6,
        ("tidar:decode_steps_total", ""): 3,
        ("tidar:decode_tokens_total", ""): 6,
    }
    assert {name: values[name] for name in expected} == expected


def test_replicas_share_a_page() -> None:
    idle = EngineStats(0, 0, 0, 12)
    first, second = counted("r1"), ReplicaMetrics("tiny", "r2", block_length=4)
    # As they come over Ray.
    parts = [pickle.loads(pickle.dumps(replica.collect(idle))) for replica in (first, second)]
    page = render(parts).decode()
    assert page.count("# TYPE vllm:generation_tokens_total counter") == 1
    assert "_created" not in page
    look = read_page(page, 0.0)
    replicas = look.replicas
    assert (replicas["r1"]["vllm:generation_tokens_total"], replicas["r2"]["vllm:generation_tokens_total"]) == (7, 0)
    table = replica_table(look)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0] == ("r1", "0", "0", "0.0%", "7", "-", "2.00", "42.9%")
    assert rows[1] == ("r2", "0", "0", "0.0%", "0", "-", "-", "-")
    assert rows[2] == ("all", "0", "0", "0.0%", "7", "-", "2.00", "42.9%")


def test_the_live_table_tells_what_happened_between_two_looks() -> None:
    def counts(**values: float) -> dict[str, float]:
        return {f"{name.replace('__', ':')}_total": value for name, value in values.items()}

    first = counts(vllm__generation_tokens=100, tidar__decode_tokens=90, tidar__decode_steps=90)
    second = counts(vllm__generation_tokens=150, tidar__decode_tokens=140, tidar__decode_steps=110)
    fresh = counts(vllm__generation_tokens=8, tidar__decode_tokens=6, tidar__decode_steps=4)
    table = replica_table(Snapshot(12.0, {"a": second, "b": fresh}), Snapshot(10.0, {"a": first}))
    speeds, per_step = (list(table.columns[place].cells) for place in (5, 6))
    assert speeds == ["25.0", "-", "-"], "one look at b is too few"
    assert per_step == ["2.50", "1.50", "2.33"]
    idle = replica_table(Snapshot(13.0, {"a": second}), Snapshot(12.0, {"a": second}))
    assert [list(column.cells) for column in idle.columns][5:7] == [["0.0"], [f"{140 / 110:.2f}"]]
    mixed = replica_table(Snapshot(1.0, {"a": first, "b": fresh}, {"a": "tiny", "b": "tiny/plain"}))
    assert list(mixed.columns[0].cells) == ["a tiny", "b tiny/plain", "all"]
    assert mixed.title is None


@pytest.mark.parametrize("engines_wanted", [1, 3])
def test_a_model_with_too_few_engines_is_told_of(engines_wanted: int) -> None:
    ingress = IngressMetrics("here")
    without = {"[gone]": (0, False), "late": (2, False), "asleep": (0, True), "waking": (1, True)}
    ingress.watch("tiny", Behind(1, engines_wanted=engines_wanted))
    for model, (waiting, sleeps) in without.items():
        ingress.watch(model, Behind(0, sleeps))
        for _ in range(waiting):
            ingress.begun()
            ingress.goes_over("", model)
    page = render([counted("r1").collect(EngineStats(0, 0, 0, 12)), ingress.collect()]).decode()
    told = {line.split()[0]: line.split()[1] for line in page.splitlines() if line.startswith("tidar:engines_ready")}
    assert [told[f'tidar:engines_ready{{ingress="here",model_name="{name}"}}'] for name in ("tiny", "[gone]")] == [
        "1.0",
        "0.0",
    ]
    table = replica_table(read_page(page, 0.0))
    assert list(table.columns[0].cells) == ["r1 tiny"]
    console = Console(width=80, file=StringIO())
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    few = ["tiny has 1 of 3 engines: `serve status` says what the others wait for"] if engines_wanted > 1 else []
    assert [line.strip() for line in shown.splitlines()[: len(few) + 4]] == [
        *few,
        "[gone] has no replica that answers",
        "late has no replica that answers: 2 requests wait for it",
        "asleep sleeps: the next request wakes it",
        "waking is woken: 1 request waits for it",
    ]


def test_a_server_that_says_less_is_read_too() -> None:
    (shortage,) = read_page('tidar:model_sleeps{model_name="m",ingress="i"} 0\n', 0.0).short.values()
    assert shortage.words() == "has no replica that answers"


def test_every_ingress_is_on_the_page_once_as_it_told_last() -> None:
    here, there = IngressMetrics("here"), IngressMetrics("there")
    for ingress in (here, there):
        ingress.watch("tiny", Behind())
    passed_on = [here.told()]
    for status in (200, 500):
        there.answered("tiny", status)
        passed_on.append(there.told())
    here.answered("tiny", 200)  # what this one shows of itself is of this moment
    late, early = [passed_on[2], passed_on[0]], [passed_on[1], passed_on[0]]
    for replicas in ([late, early], [early, late]):
        told = [pickle.loads(pickle.dumps(counts)) for replica in replicas for counts in replica]  # as over Ray
        page = render([*here.of_others(told), here.collect()]).decode()
        lines = [line for line in page.splitlines() if line.startswith("tidar:http_responses_total") and "tiny" in line]
        values = dict(line.rsplit(" ", 1) for line in lines)
        assert len(lines) == len(values)
        assert {name: value for name, value in values.items() if value != "0.0"} == {
            'tidar:http_responses_total{code="200",ingress="here",model_name="tiny"}': "1.0",
            'tidar:http_responses_total{code="200",ingress="there",model_name="tiny"}': "1.0",
            'tidar:http_responses_total{code="500",ingress="there",model_name="tiny"}': "1.0",
        }
        assert page.count("# TYPE tidar:http_responses_total counter") == 1


def test_the_names_directories_share_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("cluster.observe.ingress_metrics.time", SimpleNamespace(monotonic=lambda: now))
    ingress = IngressMetrics("here")
    first = ingress.told_lately()
    ingress.answered("tiny", 200)
    assert ingress.told_lately() is first
    now += 1
    later = ingress.told_lately()
    assert later.number == first.number + 1
    assert '{code="200",ingress="here",model_name="tiny"} 1.0' in render([pickle.loads(later.series)]).decode()


def test_rows_of_a_decode_step_are_without_text_that_is_read() -> None:
    metrics = ReplicaMetrics("tiny", "r1", block_length=4)
    prompt, drafting, again = (step(number, drafted, 0) for number, drafted in ((0, 0), (1, 3), (2, 0)))
    for output, read in ((prompt, 400), (drafting, 0), (again, 400)):
        assert output.trace is not None
        trace = output.trace._replace(verify_rows=output.trace.verify_rows + read)
        metrics.stepped(output._replace(trace=trace), Timing(started=10.0), now=10.5)
    page = render([metrics.collect(EngineStats(0, 0, 0, 12))]).decode()
    assert 'tidar:decode_rows_total{engine="r1",model_name="tiny"} 13.0' in page, "3 drafts, 2 anchors, twice 4 masks"


def test_a_page_of_nobody_is_empty() -> None:
    assert render([]) == b""


@pytest.mark.parametrize("resumed", [True, False])
def test_a_stream_that_came_from_elsewhere_is_no_second_prompt_and_no_second_first_token(resumed: bool) -> None:
    metrics = ReplicaMetrics("tiny", "r1", block_length=4)
    timing = Timing(started=10.0, prompt=5, prompt_counted=True, resumed=resumed)
    metrics.arrived(timing)
    metrics.stepped(step(0, 0, 0, cached=4), timing, now=10.5)
    metrics.stepped(step(1, 0, 0), timing, now=11.0)
    metrics.ended(FinishReason.ABORT, timing, now=12.0)
    metrics.ended(FinishReason.ABORT, Timing(started=10.0, resumed=resumed), now=11.0)  # one that had no token here
    page = render([metrics.collect(EngineStats(0, 0, 0, 12))]).decode()
    assert 'vllm:prompt_tokens_total{engine="r1",model_name="tiny"} 0.0' in page
    assert 'vllm:prefix_cache_queries_total{engine="r1",model_name="tiny"} 0.0' in page
    assert 'vllm:prefix_cache_hits_total{engine="r1",model_name="tiny"} 0.0' in page
    told = 0.0 if resumed else 1.0
    assert f'tidar:aborted_without_token_seconds_count{{engine="r1",model_name="tiny"}} {told}' in page
    assert f'vllm:time_to_first_token_seconds_count{{engine="r1",model_name="tiny"}} {told}' in page
    assert 'vllm:inter_token_latency_seconds_count{engine="r1",model_name="tiny"} 1.0' in page
