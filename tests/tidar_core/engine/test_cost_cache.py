"""Step costs on disk: taken where they still hold, measured anew where they do not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tidar_core.engines import tiny_engine
from tidar_core.engine import cost_cache, start
from tidar_core.engine.cost_cache import cost_file, known_cost
from tidar_core.engine.step_cost import StepCost
from tidar_core.engine.warmup import measure_cost

COST = StepCost((1, 4, 16), (1.0, 1.1, 2.0), (0.1, 0.1, 0.2), (0.0, 0.1, 0.3), 1e-6, 2e-6)


class Machine:
    """A machine that is so many times slower than when COST was measured, at `uneven` of three row counts so many times
    more; it counts its measurements. preempted: how often other programs come between while costs are checked."""

    def __init__(self, slower: float = 1.0, preempted: int = 0, uneven: tuple[float, float, float] = (1.0, 1.0, 1.0)):
        self.slower = slower
        self.preempted = preempted
        self.uneven = uneven
        self.taken = self.measured = 0

    def measure(self) -> StepCost:
        self.measured += 1
        cost = COST.at_pace(self.slower)
        return replace(cost, trunk=tuple(more * seconds for more, seconds in zip(self.uneven, cost.trunk, strict=True)))

    def check(self, cost: StepCost) -> list[tuple[float, float]]:
        self.taken += self.preempted
        now = self.slower * np.array(self.uneven) * np.array(COST.trunk)
        return list(zip(cost.trunk, now.tolist(), strict=True))

    def known(self, path: Path) -> StepCost:
        return known_cost(path, self.measure, self.check, lambda: self.taken)


def test_what_was_measured_is_not_measured_again(tmp_path):
    path, machine = cost_file(tmp_path / "new", model="m", threads=2), Machine()
    assert machine.known(path) == COST
    again = Machine(1.1)
    assert again.known(path) == COST.at_pace(1.1)
    assert (machine.measured, again.measured) == (1, 0)
    assert list((tmp_path / "new").iterdir()) == [path]


@pytest.mark.parametrize("slower", [2.0, 0.4])
def test_a_machine_of_another_pace_is_not_measured_anew(tmp_path: Path, slower: float) -> None:
    path = cost_file(tmp_path, model="m")
    Machine().known(path)
    machine = Machine(slower, uneven=(1.0, 1.19, 0.85))
    assert machine.known(path) == COST.at_pace(slower)
    assert machine.measured == 0
    assert Machine().known(path) == COST, "what is kept is what was measured"


@pytest.mark.parametrize("slower", [1.0, 2.0, 0.4])
@pytest.mark.parametrize("uneven", [(1.0, 1.0, 1.3), (1.0, 1.0, 0.75), (0.75, 1.0, 1.0)])
def test_a_machine_that_changed_in_one_thing_is_measured_anew(
    tmp_path: Path, slower: float, uneven: tuple[float, float, float]
) -> None:
    path = cost_file(tmp_path, model="m")
    Machine().known(path)
    changed = Machine(slower, uneven=uneven)
    assert changed.known(path) == Machine(slower, uneven=uneven).measure()
    assert changed.measured == 1
    assert Machine(slower, uneven=uneven).known(path) == changed.measure()


# Looks at a machine that is twice as slow: what other programs fall on, and whether they take the processor away.
@pytest.mark.parametrize(
    ("looks", "pace"),
    [
        ([((1.0, 1.0, 1.5), 0), ((1.6, 1.0, 1.0), 0)], 2.0),
        ([((1.6, 1.6, 1.0), 0), ((1.0, 1.0, 1.0), 0)], 2.0),
        ([((1.0, 1.5, 1.0), 0), ((1.8, 1.0, 1.7), 100)], 2.0),
        ([((1.5, 1.0, 1.5), 100)], 1.0),
        ([((0.3, 0.25, 0.3), 100)], 0.6),
        ([((1.0, 1.0, 1.5), 0), ((1.0, 1.0, 1.5), 0)], None),
        ([((1.0, 1.0, 0.3), 100), ((1.0, 1.0, 0.3), 100)], None),
    ],
)
def test_a_second_look_comes_before_all_is_measured(
    tmp_path: Path, looks: list[tuple[tuple[float, float, float], int]], pace: float | None
) -> None:
    path = cost_file(tmp_path, model="m")
    Machine().known(path)
    machine, coming = Machine(2.0), list(looks)

    def check(cost: StepCost) -> list[tuple[float, float]]:
        machine.uneven, machine.preempted = coming.pop(0)
        return machine.check(cost)

    cost = known_cost(path, machine.measure, check, lambda: machine.taken)
    assert coming == []
    assert machine.measured == (pace is None)
    if pace is not None:
        assert cost.trunk == pytest.approx(COST.at_pace(pace).trunk)


def test_a_busy_moment_is_not_measured(tmp_path):
    path = cost_file(tmp_path, model="m")
    Machine().known(path)
    busy = Machine(2.0, preempted=100)
    assert busy.known(path) == COST
    assert busy.measured == 0
    once = Machine(2.0, preempted=2)
    assert once.known(path) == COST.at_pace(2.0)
    faster = Machine(0.5, preempted=100)
    assert faster.known(path) == COST.at_pace(0.5)
    assert faster.measured == 0


def test_what_a_busy_machine_was_measured_to_cost_is_taken_for_less_on_an_idle_one(tmp_path: Path) -> None:
    path = cost_file(tmp_path, model="m")
    Machine(1.2).known(path)
    found = Machine().known(path)
    for part in ("trunk", "head", "adapter", "reading", "attending"):
        assert getattr(found, part) == pytest.approx(getattr(COST, part)), part


def test_an_engine_measures_once_and_again_where_the_kept_cost_is_too_high(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "cache_directory", lambda: tmp_path / "cache")
    measured = []

    def counted(*given):
        measured.append(measure_cost(*given))
        return measured[-1]

    monkeypatch.setattr(start, "measure_cost", counted)
    monkeypatch.setattr(cost_cache, "APART", 20.0)  # other programs may run beside this test
    tiny_engine(tmp_path / "first")
    tiny_engine(tmp_path / "second")
    assert len(measured) == 1
    (path,) = (tmp_path / "cache").rglob("step-cost-*.json")
    for part in ("trunk", "head", "adapter"):
        kept = json.loads(path.read_text())
        kept[part] = [seconds + 10.0 * (rows >= 48) for rows, seconds in zip(kept["rows"], kept[part], strict=True)]
        path.write_text(json.dumps(kept))
        count = len(measured)
        tiny_engine(tmp_path / part)
        assert len(measured) == count + (part != "head"), part
    for price in ("reading", "attending"):  # of a token of context
        path.write_text(json.dumps(json.loads(path.read_text()) | {price: 1.0}))
        count = len(measured)
        tiny_engine(tmp_path / price)
        assert len(measured) == count + 1, price


def test_other_things_have_other_files(tmp_path):
    files = {cost_file(tmp_path, model=model, threads=threads) for model in "ab" for threads in (1, 2)}
    assert len(files) == 4
    assert cost_file(tmp_path, model="a", threads=1) == cost_file(tmp_path, threads=1, model="a")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [1], "trunk": [], "head": [], "adapter": []}', "\0"])
def test_a_spoiled_file_is_replaced(tmp_path, content):
    path, machine = cost_file(tmp_path, model="m"), Machine()
    path.write_text(content)
    assert machine.known(path) == COST
    assert machine.measured == 1
    assert Machine().known(path) == COST


def test_without_room_on_disk_it_is_measured_each_time(tmp_path):
    (tmp_path / "file").write_text("")
    machine = Machine()
    for _ in range(2):
        assert machine.known(tmp_path / "file" / "cost.json") == COST
    assert machine.measured == 2


def test_other_kernels_have_other_files(tmp_path, monkeypatch):
    """What counts as another: tests/tidar_core/kernels/test_sources.py."""
    known = cost_file(tmp_path, model="a")
    monkeypatch.setattr(cost_cache, "code_digest", lambda: "of other kernels")
    assert cost_file(tmp_path, model="a") != known
