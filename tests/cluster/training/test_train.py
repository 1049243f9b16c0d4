"""Drafters trained by two workers of Ray Train: the same steps, the same bits, whatever dies on the way."""

import errno
import os
import pickle
import re
import signal
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision, create_failure_policy
from typer.testing import CliRunner

import cluster.training.train
from cluster.operate import ray_cluster
from cluster.operate.interrupts import Interrupts
from cluster.training.train_worker import check_seen
from tests.cluster.training.observed_work import observed_work, seen_by
from tests.tidar_core.convert.trained import random_documents
from tests.tiny import tiny_checkpoint
from tidar_core.cli import app
from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.convert.checkpoint import Progress, load_checkpoint
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.run import convert
from tidar_core.convert.shards import DataHeader, Document, content_key, open_store
from tidar_core.convert.trainer import StepReport, TrainConfig
from tidar_core.model.adapter import tokenizer_fingerprint
from tidar_core.model.adapter_config import read_adapter_config
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

STEPS, ROWS = 40, 128


class Shown:
    """A screen that keeps what it is told. victim: a file with the id of a process to kill once step 8 is seen."""

    def __init__(self, victim: Path | None = None) -> None:
        self.lines: list[str] = []
        self.steps: dict[int, StepReport] = {}
        self.measurements: list[float] = []
        self._victim = victim

    def line(self, text: str) -> None:
        self.lines.append(text)

    def loading(self, done: int, total: int) -> None:
        pass

    def gathered(self, gathered: Any, goal: Any) -> None:
        pass

    def trained(self, report: StepReport, used: float, fraction: float | None) -> None:
        self.steps[report.progress.step] = replace(report, progress=replace(report.progress))
        if report.progress.step >= 8 and self._victim is not None:
            os.kill(int(self._victim.read_text()), signal.SIGKILL)
            self._victim.with_name("struck").touch()
            self._victim = None

    def measured(self, result: Any, progress: Progress, best: bool) -> None:
        self.measurements.append(result.tokens_per_step)


@pytest.fixture(autouse=True)
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process less
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("train") / "model", layers=1, hidden=48, head_dim=16)


@pytest.fixture(scope="module")
def options(model: Path) -> ConvertOptions:
    train = TrainConfig(block=4, anchors=16, rows_a_step=ROWS, learning_rate=1e-2, warmup=5, measure_every=8)
    return ConvertOptions(
        str(model), model.with_name("pair"), model.with_name("data"), own_tokens=3000, steps=STEPS, rank=8,
        device="cpu", dtype="float32", threads=1, train=train,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(options: ConvertOptions) -> Shown:
    """One worker with the rows of two, on documents that all trainings share."""
    assert options.data is not None
    source = find_model(options.model)
    header = DataHeader(
        model=source.name, fingerprint="", tokenizer=tokenizer_fingerprint(load_tokenizer(source)), seed=0
    )
    documents = [
        Document(tuple(tokens.tolist()), tuple(own.tolist()), content_key(tokens.tolist()), "text", number)
        for number, (tokens, own) in enumerate(random_documents(160))
    ]
    open_store(options.data, header).append(documents, [], 0.0)
    shown = Shown()
    train = replace(options.train, rows_a_step=2 * ROWS)
    convert(replace(options, out=options.out.with_name("alone"), train=train), shown)
    return shown


def test_two_workers_train_as_one_though_one_of_them_dies(
    options: ConvertOptions, alone: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.training.train, "work", observed_work)
    shown = Shown(victim=options.work / "pid-1")
    with cluster.training.train.workers_on_ray(2, options, shown) as trainers:
        progress = convert(options, shown, trainers)
    assert progress.step == STEPS

    # It was killed behind step 8, and all went on from a checkpoint, not from the start.
    (going_on,) = [line for line in shown.lines if line.startswith("going on from step")]
    assert int(going_on.split()[-1]) >= 8

    # Step by step what one worker with all the rows learns, also behind the restart.
    assert list(shown.steps) == list(range(1, STEPS + 1))
    rows = 0
    for step, report in shown.steps.items():
        assert report.loss == pytest.approx(alone.steps[step].loss, rel=1e-3)
        assert report.progress.rows == alone.steps[step].progress.rows
        assert abs(report.mask_rows - (report.progress.rows - rows) / 2) <= options.train.block
        rows = report.progress.rows
    assert shown.measurements[-1] == pytest.approx(alone.measurements[-1], rel=0.02)
    losses = [report.loss for report in shown.steps.values()]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

    # To the bit the same on both workers, and what is written is what they hold.
    both = [seen_by(options.work, rank) for rank in (0, 1)]
    assert both[0] == both[1]
    assert str(STEPS) in both[0]
    assert len(set(both[0].values())) == len(both[0]) > 1
    config = read_adapter_config(options.out)
    assert config.training["steps"] in range(0, STEPS + 1, 8)
    assert config.training["device"] == "2 workers with 1 CPU thread each"
    found = load_checkpoint(options.work / "training", {})
    assert found is not None
    assert found[0].step == STEPS


def test_more_workers_than_there_is_room_for_are_refused_before_anything_is_gathered(
    model: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["convert", str(model), "--workers", "999", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    first, line = result.stderr.strip().splitlines()
    assert first == "starting Ray"
    message = r"tidar: 999 workers need 999 CPUs, Ray sees \d+(, of which others have \d+)?: lower --workers"
    assert re.fullmatch(message, line)
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("nodes", "gpus", "threads", "message"),
    [
        ([{"CPU": 4.0}] * 4, False, 4, None),
        ([{"CPU": 3.0}] * 6, False, 4, "4 CPUs of one node, and Ray's nodes have room for 0: lower --workers or --thr"),
        ([{"CPU": 7.0}] * 3, False, 4, "4 CPUs of one node, and Ray's nodes have room for 3: lower --workers or --thr"),
        ([{"GPU": 2.0, "CPU": 9.0}] * 2, True, 0, None),
        ([{"GPU": 4.0, "CPU": 1.0}, {"CPU": 8.0}], True, 0, "1 GPU and 1 CPU of one node, .* room for 1: lower --work"),
    ],
)
def test_workers_of_which_one_fits_on_no_node_are_refused(
    nodes: list[dict[str, float]], gpus: bool, threads: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_together = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
    monkeypatch.setattr(ray, "cluster_resources", lambda: all_together)
    monkeypatch.setattr(ray, "available_resources", lambda: all_together)
    by_id = {str(number): node for number, node in enumerate(nodes)}
    monkeypatch.setattr(cluster.training.train, "available_resources_per_node", lambda: by_id)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=f"^each of 4 workers needs {message}"):
        cluster.training.train.check_room(4, gpus, threads)


@pytest.mark.parametrize("missing", ["model", "start", "data", "out.work"])
def test_a_node_that_does_not_see_what_the_workers_share_is_told(tmp_path: Path, missing: str) -> None:
    named = {name: tmp_path / name for name in ("model", "start", "data", "out.work")}
    for path in named.values():
        path.mkdir()
    options = ConvertOptions(str(named["model"]), tmp_path / "out", named["data"], start=str(named["start"]))
    check_seen(options)
    check_seen(replace(options, model=DEFAULT_MODEL, start="none"))
    named[missing].rmdir()
    with pytest.raises(ConfigError, match=rf"^{named[missing]} is not there on .*: put it where every node sees it$"):
        check_seen(options)


class Saying:
    """A queue of what workers have sent."""

    def __init__(self, *news: object) -> None:
        self.news = [pickle.dumps(each) for each in news]

    def qsize(self) -> int:
        return len(self.news)

    def get_nowait_batch(self, count: int) -> list[bytes]:
        taken, self.news = self.news[:count], self.news[count:]
        return taken


def test_what_a_worker_cannot_do_ends_the_run_in_one_line() -> None:
    shown, run = Shown(), Future[Any]()
    queue = Saying(methodcaller("line", "hello"), ConfigError("the disk is full"))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^the disk is full$"):
        cluster.training.train.follow(run, queue, shown, Interrupts())  # type: ignore[arg-type]
    assert time.monotonic() - began < 5
    assert shown.lines == ["hello"]


def test_workers_that_fail_again_and_again_are_one_line() -> None:
    run = Future[Any]()
    run.set_exception(WorkerGroupError("…", {1: RuntimeError("a trace\nCUDA out of memory")}))
    message = r"^the workers failed, 3 new starts included; .*: CUDA out of memory; the same command goes on from here$"
    with pytest.raises(ConfigError, match=message):
        cluster.training.train.follow(run, Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


CUDA_IS_FULL = """Traceback (most recent call last):
  File "train_worker.py", line 28, in work
    return train_gathered(options)
torch.AcceleratorError: CUDA error: out of memory
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_of_an_error_with_advice_behind_it_the_error_is_told() -> None:
    run = Future[Any]()
    run.set_exception(WorkerGroupError("…", {1: RuntimeError(CUDA_IS_FULL)}))
    with pytest.raises(ConfigError, match=r"with: torch.AcceleratorError: CUDA error: out of memory; the same command"):
        cluster.training.train.follow(run, Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_workers_that_cannot_be_started_are_one_line_that_says_why() -> None:
    run = Future[Any]()
    run.set_exception(ControllerError(RuntimeError("a trace\nconnection refused")))
    message = r"^the workers could not be started: connection refused; the same command goes on from here$"
    with pytest.raises(ConfigError, match=message):
        cluster.training.train.follow(run, Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_workers_that_find_no_room_again_are_not_waited_for_for_ever() -> None:
    """As where a node dies and none takes its place: Ray by itself would look again without end."""
    policy = create_failure_policy(cluster.training.train.PATIENCE)
    error = ControllerError(WorkerGroupStartupTimeoutError(4))
    decisions = [policy.make_decision(error) for _ in range(20)]
    assert set(decisions[:5]) == {FailureDecision.RETRY}  # for minutes, in which a node may come
    assert decisions[-1] == FailureDecision.RAISE

    run = Future[Any]()
    run.set_exception(error)
    message = r"^the cluster has no room for 4 workers any more, and none came: lower --workers; the same command"
    with pytest.raises(ConfigError, match=message):
        cluster.training.train.follow(run, Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_room_that_went_while_the_words_were_gathered_is_told(
    options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = iter([None, ConfigError("2 workers need 2 CPUs")])

    def check_room(*_: object) -> None:
        if (problem := next(rooms)) is not None:
            raise problem

    monkeypatch.setattr(cluster.training.train, "check_room", check_room)
    monkeypatch.setattr(cluster.training.train, "ray_cluster", lambda *_: nullcontext())
    trainers = cluster.training.train.workers_on_ray(2, options, Shown())
    with trainers as train, pytest.raises(ConfigError, match="2 workers need 2 CPUs"):
        train(options, 0.0, Shown())


def test_a_ray_that_ends_under_the_workers_is_one_line() -> None:
    class Gone(Saying):
        def qsize(self) -> int:
            raise ActorDiedError

    with pytest.raises(ConfigError, match=r"^the workers cannot go on: .*; the same command goes on from here$"):
        cluster.training.train.follow(Future[Any](), Gone(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_of_a_process_of_ray_that_could_not_be_made_the_reason_is_told() -> None:
    """As Ray Train's own on a full disk, into which it writes a folder before all else."""
    full = OSError(errno.ENOSPC, "No space left on device")
    run = Future[Any]()
    made = RayTaskError("TrainController.__init__", f"Traceback …\nOSError: {full}", full)
    run.set_exception(ActorDiedError(made))
    with pytest.raises(
        ConfigError, match=r"^the workers cannot go on: OSError: \[Errno 28\] No space left on device; the"
    ):
        cluster.training.train.follow(run, Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_a_ray_of_our_own_that_ends_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, Ray ends this process in the middle after a minute, with lines of its own."""
    monkeypatch.setattr(ray_cluster, "ended_parts", lambda: ["gcs_server"])
    with pytest.raises(ConfigError, match=r"^the Ray cluster is gone: its gcs_server ended$"):
        cluster.training.train.follow(Future[Any](), Saying(), Shown(), Interrupts())  # type: ignore[arg-type]


def test_an_interrupt_ends_it() -> None:
    asked = Interrupts()
    asked.asked = True
    with pytest.raises(KeyboardInterrupt):
        cluster.training.train.follow(Future[Any](), Saying(), Shown(), asked)  # type: ignore[arg-type]


def test_full_mode_has_one_worker(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["convert", str(model), "--mode", "full", "--workers", "2", "--out", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert result.stderr.strip() == "tidar: --mode full trains in one process: leave --workers out"


def test_without_ray_train_one_line_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cluster.training.train", None)
    result = CliRunner().invoke(app, ["convert", str(model), "--workers", "2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.strip().endswith("pip install -e '.[cluster,train]' in the repository")
