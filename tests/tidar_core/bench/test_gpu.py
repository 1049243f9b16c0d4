"""`tidar bench gpu`: phases fail, hang and end by themselves, and what was found is kept."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from tidar_core.bench import gpu, kernels, measures
from tidar_core.bench import steps as bench_steps
from tidar_core.bench.checking import Check, each_or_failed
from tidar_core.bench.device_command import write_record
from tidar_core.bench.gpu import Phase, outcome, phases, run_gpu_bench, steps_chart
from tidar_core.bench.measures import Ceilings, Measure
from tidar_core.bench.shapes import SHAPES
from tidar_core.bench.steps import PrefillTime, StepTime
from tidar_core.cli import app
from tidar_core.kernels.triton_gemm import PREFETCH_BYTES

LONGEST = 500  # seconds for a phase that is to end by itself


def test_a_phase_that_fails_or_hangs_costs_no_other(tmp_path):
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    works = ("decode", "--model", model, "--batch", "1", "--rounds", "1", "--prompts", "1", "--max-tokens", "4")
    chosen = [
        Phase("no GPU", ("kernels", "--shape", "SmolLM2-135M"), LONGEST),
        Phase("too slow", ("soak", "--model", model), 0.5),
        Phase("works", (*works, "--device", "cpu", "--no-graphs"), LONGEST),
    ]
    kept = []
    record = run_gpu_bench(chosen, 10.0, lambda line: None, lambda found: kept.append(sorted(found["phases"])))
    assert record["phases"]["no GPU"]["error"] == "exit status 1"
    assert "this bench needs an NVIDIA GPU" in " ".join(record["phases"]["no GPU"]["output"].split())
    assert record["phases"]["too slow"]["error"] == "stopped after 0 s"
    works_record = record["phases"]["works"]
    assert "error" not in works_record
    assert [one["drafts"] for one in works_record["decode"]] == ["off", "auto", "full"]
    assert kept == [["no GPU"], ["no GPU", "too slow"], ["no GPU", "too slow", "works"]]


def test_the_phase_that_compares_with_transformers_tells_who_was_faster_and_where(tmp_path, monkeypatch):
    """By paths from where it is called, though the engines are started elsewhere."""
    tiny_checkpoint(tmp_path / "tiny", max_positions=4096)
    monkeypatch.chdir(tmp_path)
    (phase,) = (phase for phase in phases("tiny") if "--peer" in phase.command)
    little = ("--rounds", "1", "--prompts", "1", "--max-tokens", "8", "no environments")
    chosen = replace(phase, seconds=LONGEST, command=(*phase.command, *little))
    record = run_gpu_bench([chosen], 10.0, lambda line: None, lambda found: None)["phases"][phase.name]
    assert "error" not in record, record
    assert [found["engine"] for found in record["peers"]] == ["tidar bfloat16, drafts off", "transformers"]
    assert all(found["device"] for found in record["peers"])
    assert record["peers"][1]["ratio"] > 0


SLEEPS = """
import sys
from tidar_core.bench.checking import Check
from tidar_core.bench.gpu import Phase, run_gpu_bench
sys.executable = sys.argv[1]
run_gpu_bench([Phase("sleeps", (), 60)], 1.0, print, print)
"""


def test_whoever_ends_the_bench_ends_the_phase_under_way(tmp_path):
    phase, told = tmp_path / "phase", tmp_path / "pid"
    phase.write_text(f"#!/bin/sh\necho $$ > {told}.part\nmv {told}.part {told}\nexec sleep 60\n")
    phase.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", SLEEPS, phase], stderr=subprocess.DEVNULL) as bench:
        while not told.exists():
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_who_ends_it_while_a_phase_is_being_started_ends_that_too(number, monkeypatch):
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            begun.append(self.pid)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(gpu.subprocess, "Popen", Interrupted)
    before = signal.signal(number, signal.default_int_handler)  # some run tests with SIGINT or SIGHUP ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            run_gpu_bench([Phase("any", ("kernels",), 60)], 1.0, lambda line: None, lambda found: None)
    finally:
        signal.signal(number, before)
    with pytest.raises(ProcessLookupError):
        os.kill(begun[0], signal.SIGKILL)


def test_a_signal_that_is_ignored_stays_so_and_the_others_are_as_before(monkeypatch):
    numbers = signal.SIGTERM, signal.SIGHUP
    before, during = [signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.signal(signal.SIGHUP, signal.SIG_IGN)], []
    monkeypatch.setattr(gpu, "_run", lambda phase, seconds: during.extend(map(signal.getsignal, numbers)) or {})
    try:
        run_gpu_bench([Phase("any", (), 60)], 1.0, lambda line: None, lambda found: None)
        assert during == [signal.default_int_handler, signal.SIG_IGN]
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL, signal.SIG_IGN]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_what_overlaps_is_left_out_once_answers_differ(monkeypatch):
    """Then alone there is something to learn of it; and training is measured where all else has had its turn."""
    chosen = phases("any")
    (second,) = (phase for phase in chosen if phase.where_failed)
    off = ("--no-overlap-steps", "--no-graphs", "--no-overlap-launches")
    (first,) = (phase for phase in chosen if phase.name == second.where_failed)
    assert second.command == (*first.command, *off)
    for failed in (True, False):
        monkeypatch.setattr(gpu, "_run", lambda phase, seconds, failed=failed: {"failed": True} if failed else {})
        record = run_gpu_bench(chosen, 1.0, lambda line: None, lambda found: None)
        assert (second.name in record["phases"]) == failed
        assert "training" in record["phases"]


def test_what_raised_among_steps_is_told_by_name():
    step = {"context": 512, "rows": 1, "microseconds": 41.0, "share": 0.5}
    raised = Check("prefill of any", "RuntimeError: no", "bfloat16", math.nan, 0.0).as_record()
    found = {"error": "exit status 1", "checks": [raised], "steps": [step]}
    said = ["exit status 1", "prefill of any: RuntimeError: no", "a row 41 µs, 50% of read bandwidth"]
    assert outcome(found) == "; ".join(said)


def test_without_time_left_nothing_is_started():
    record = run_gpu_bench(phases("any"), 0.05, lambda line: None, lambda found: None)
    assert {phase["error"] for phase in record["phases"].values()} == {"no time left"}


def test_the_chart_has_a_line_a_shape():
    def step(
        rows: int, microseconds: float, context: int = 512, adapter: bool = True, shape: str = "small"
    ) -> dict[str, object]:
        mask = max(0, rows - 8)
        return {
            "shape": shape, "rows": rows, "mask": mask, "adapter": adapter and mask > 0, "context": context,
            "microseconds": microseconds,
        }  # fmt: skip

    steps = [step(16, 440.0), step(1, 400.0), step(16, 9.0, adapter=False), step(1, 900.0, context=4096)]
    large = [step(1, 2.0, shape="large"), step(16, 3.0, shape="large")]
    record = {
        "phases": {
            "steps": {"steps": steps, "exact": True},
            "steps large": {"steps": large, "exact": True},
            "steps, other settings": {"steps": [step(1, 5.0), step(16, 9.0)], "exact": True},
            "inexact": {"steps": steps, "exact": False},
            "failed": {"error": "exit status 1"},
        }
    }
    chart = steps_chart(record)
    assert "line [1.000, 1.100]\n    line [1.000, 1.500]\n```" in chart
    assert '"rows in a step" [1, 16]' in chart
    record["phases"]["steps large"]["steps"] = large[:1]  # it was stopped there
    chart = steps_chart(record)
    assert '"rows in a step" [1]' in chart
    assert "    line [1.000]\n    line [1.000]\n```" in chart
    assert steps_chart({"phases": {}}) == ""


def test_a_check_that_raises_is_one_that_failed_and_keeps_no_other_from_its_own(capsys):
    def checks():
        yield Check("add_norm", "7 rows", "float32", 0.0, 1e-4)
        raise RuntimeError("out of resources")

    found = list(each_or_failed("rows", torch.float32, checks()))
    assert [check.passed for check in found] == [True, False]
    assert (found[1].kernel, found[1].case) == ("rows", "RuntimeError: out of resources")
    assert "out of resources" in capsys.readouterr().err


def test_a_kernel_that_raises_ends_its_own_measures_alone(monkeypatch):
    picked = Measure("toy", "pick", "a row", 1.0, 1, None)

    def broken(subject):
        yield Measure("toy", "linear", "a row", 1.0, 1, None)
        raise RuntimeError("out of resources")

    monkeypatch.setattr(measures, "measure_products", broken)
    monkeypatch.setattr(measures, "measure_attention", lambda subject: iter(()))
    monkeypatch.setattr(measures, "measure_small", lambda subject: iter([picked]))
    found = list(measures.measure_all(SimpleNamespace(dtype=torch.bfloat16)))
    assert [type(one) for one in found] == [Measure, Check, Measure]
    assert (found[1].kernel, found[1].passed) == ("measuring products", False)


def test_steps_that_raise_keep_no_prompt_from_being_measured(monkeypatch, tmp_path):
    def broken(*given):
        yield StepTime("SmolLM2-135M", 512, 1, 1, 0, False, 4.0, 0.5)
        raise RuntimeError("out of resources")

    for name in ("random_model", "triton_ops"):
        monkeypatch.setattr(bench_steps, name, lambda *given, **named: None)
    monkeypatch.setattr(bench_steps, "measure_ceilings", lambda *given: Ceilings(1.0, 1.0))
    monkeypatch.setattr(bench_steps, "measure_steps", broken)
    monkeypatch.setattr(bench_steps, "measure_prefill", lambda *given: iter([PrefillTime("SmolLM2-135M", 9, 9, 1.0)]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(kernels, "require_gpu", lambda: None)
    file = tmp_path / "steps.json"
    told = CliRunner().invoke(app, ["bench", "steps", "--shape", "SmolLM2-135M", "--json", str(file)])
    assert told.exit_code == 1, told.output
    assert "steps of SmolLM2-135M: RuntimeError: out of resources" in told.output
    record = json.loads(file.read_text())
    assert [len(record[part]) for part in ("checks", "steps", "prefill")] == [1, 1, 1]
    assert record["prefetch_bytes"] == PREFETCH_BYTES


def test_no_bench_of_a_gpu_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("steps", "measures", "reading"):
        monkeypatch.delitem(sys.modules, f"tidar_core.bench.{name}")
    for command in ("kernels", "steps", "gpu"):
        told = CliRunner().invoke(app, ["bench", command])
        assert told.exit_code == 1
        assert "this bench needs triton: pip install -e '.[cuda]' in the repository" in " ".join(told.output.split())


def test_float8_is_not_timed_where_the_kernels_have_none(monkeypatch):
    monkeypatch.setattr(kernels, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    told = CliRunner().invoke(app, ["bench", "steps", "--float8"])
    assert told.exit_code == 1
    assert "the kernels have no float8 on this GPU: leave --float8 out" in " ".join(told.output.split())


def test_the_command_keeps_what_it_found_and_says_whether_all_went_well(tmp_path, monkeypatch):
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    works = ("decode", "--model", model, "--batch", "1", "--rounds", "1", "--prompts", "1", "--max-tokens", "4")
    chosen = [Phase("works", (*works, "--device", "cpu", "--no-full"), LONGEST)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "require_gpu", lambda: None)
    monkeypatch.setattr(gpu, "phases", lambda model: chosen)
    told = CliRunner().invoke(app, ["bench", "gpu"])
    assert told.exit_code == 0, told.output
    assert re.search(r"works: batch 1 off \d+ tokens/s; batch 1 auto \d+ tokens/s", told.output)
    (record,) = tmp_path.glob("tidar-gpu-*.json")
    assert json.loads(record.read_text())["phases"]["works"]["decode"]
    chosen.append(Phase("no GPU", ("decode", "--device", "nothing"), LONGEST))
    told = CliRunner().invoke(app, ["bench", "gpu", "--json", str(tmp_path / "named.json")])
    assert told.exit_code == 1
    assert "no GPU: exit status 2" in told.output
    assert len(json.loads((tmp_path / "named.json").read_text())["phases"]) == 2
    assert not list(tmp_path.glob(".*.part"))


def test_a_check_that_failed_counts_in_a_phase_that_was_stopped(monkeypatch):
    stopped = {
        "kernels": {"checks": [{"passed": True}, {"passed": False}]},
        "exact": {"comparisons": [{"different": 0}, {"different": 3}]},
        "exact so far": {"checks": [{"passed": True}], "comparisons": [{"different": 0}]},
    }
    monkeypatch.setattr(gpu, "_run", lambda phase, seconds: {"error": "stopped after 2 s", **stopped[phase.name]})
    record = run_gpu_bench([Phase(name, (), 60) for name in stopped], 1.0, lambda line: None, lambda found: None)
    assert {name: "failed" in found for name, found in record["phases"].items()} == {
        "kernels": True, "exact": True, "exact so far": False,
    }  # fmt: skip
    assert outcome(record["phases"]["kernels"]) == "stopped after 2 s; 1 of 2 checks passed"
    assert outcome(record["phases"]["exact"]) == "stopped after 2 s; 3 answers differ"


def test_a_record_goes_through_a_pipe_and_behind_a_link(tmp_path):
    linked, link = tmp_path / "linked.json", tmp_path / "link.json"
    linked.write_text("before")
    link.symlink_to(linked)
    write_record(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(linked.read_text())["a"] == 1
    reads, writes = os.pipe()
    write_record(Path(f"/proc/self/fd/{writes}"), {"a": 2})
    os.close(writes)
    with os.fdopen(reads) as pipe:
        assert json.load(pipe)["a"] == 2


def test_what_is_timed_was_checked_before():
    words = [phase.command for phase in phases("any")]
    for name in SHAPES:
        checked = min(place for place, said in enumerate(words) if said[:3] == ("kernels", "--shape", name))
        timed = min(place for place, said in enumerate(words) if said[:3] == ("steps", "--shape", name))
        assert checked < timed
