"""What is checked on a machine that may see only a part of what is served."""

import os
from pathlib import Path
from typing import Any

import pytest

from cluster import preflight
from cluster.options import ServeOptions
from cluster.preflight import check_memory, check_options, check_paths, check_visible
from tests.servers import tiny_model
from tidar_core.config import ConfigError
from tidar_core.kernels.cpu import packs_matrices
from tidar_core.model.configuration import load_config
from tidar_core.model.footprint import weights_bytes
from tidar_core.model.sources import find_model
from tidar_core.settings import read_options


def test_what_must_not_be_looked_at_from_here_is_left_to_the_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    look = os.stat

    def guarded(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(str(locked)):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **how)

    monkeypatch.setattr(os, "stat", guarded)
    for part in ({}, {"adapter": f"{locked}/adapter"}, {"api_keys": f"{locked}/keys", "metrics_keys": f"{locked}/m"}):
        check_visible(ServeOptions(model=f"{locked}/model", **part))
    model, _ = tiny_model(tmp_path)
    (locked / "adapter").mkdir(parents=True)
    (locked / "adapter" / "adapter.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{locked}/adapter/adapter.json is not valid"):
        check_options(ServeOptions(model=str(model), adapter=f"{locked}/adapter"))
    keys = tmp_path / "keys"
    keys.write_text("# none\n")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != keys)
    check_visible(ServeOptions(model=f"{locked}/model", api_keys=str(keys)))


@pytest.mark.parametrize("part", ["api_keys", "metrics_keys", "model", "adapter"])
def test_where_the_engines_run_every_path_must_lead_somewhere(part: str, tmp_path: Path) -> None:
    model, adapter = tiny_model(tmp_path)
    (tmp_path / "keys").write_text("a-key\n")
    given = {"model": str(model), "adapter": str(adapter), "api_keys": str(tmp_path / "keys")}
    check_paths(read_options(ServeOptions, given))
    check_paths(read_options(ServeOptions, {"model": "org/from-a-hub"}))
    wrong = read_options(ServeOptions, given | {part: f"{tmp_path}/not-here"})
    check_visible(wrong)
    with pytest.raises(ConfigError, match="not-here"):
        check_paths(wrong)


@pytest.mark.parametrize("part", ["api_keys", "metrics_keys", "model", "adapter"])
def test_what_lies_at_home_is_looked_at_too(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wrong").write_text("# no key, no model, no contract\n")
    given = {"model": "org/not-here", "adapter": "none", part: "~/wrong"}
    with pytest.raises(ConfigError, match=r"~/wrong|/wrong is not valid"):
        check_visible(read_options(ServeOptions, given))


@pytest.mark.skipif(preflight.psutil.MACOS, reason="macOS lends memory without end")
@pytest.mark.parametrize(
    ("given", "engines", "mend"),
    [
        ({"replicas": 2}, 2, "lower --replicas"),
        ({"models": {"other": {"replicas": 2}}}, 3, "lower --replicas, serve fewer models"),
        ({"models": {"other": {}}}, 2, "serve fewer models"),
        ({"min_replicas": 2, "max_replicas": 9}, 2, "lower --min-replicas"),
        (
            {"min_replicas": 2, "max_replicas": 9, "models": {"other": {}}},
            4,
            "lower --min-replicas, serve fewer models",
        ),
        ({"min_replicas": 0, "max_replicas": 9, "models": {"other": {}}}, 2, "serve fewer models"),
        ({}, 1, None),  # which tells it itself
        ({"min_replicas": 1, "max_replicas": 9}, 1, None),
        ({"min_replicas": 0, "max_replicas": 9}, 1, None),
    ],
)
def test_engines_that_start_together_must_fit_into_memory_together(
    given: dict[str, Any], engines: int, mend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would find room enough for itself, and the system would end one without a word."""
    model, _ = tiny_model(tmp_path)
    source = find_model(str(model))
    given = {"model": str(model), **given}
    for other in given.get("models", {}).values():
        other["model"] = str(model)
    options = read_options(ServeOptions, given)
    shape = load_config(source)
    needed = round(engines * weights_bytes(source, shape, "bfloat16", packs_matrices(shape, 16)))
    monkeypatch.setattr(preflight, "free_memory", lambda: needed)
    check_memory(options, {str(model): source})
    monkeypatch.setattr(preflight, "free_memory", lambda: needed - 1)
    if mend is None:
        check_memory(options, {str(model): source})
        return
    with pytest.raises(
        ConfigError, match=f"weights of {engines} engines take .* GiB are free: free some, {mend}, serve in"
    ):
        check_memory(options, {str(model): source})
