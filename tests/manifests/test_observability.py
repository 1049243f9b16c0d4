"""Prometheus' rules by promtool, and every metric that rules and dashboard name against what a server serves."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import plain_http
from tests.manifests.ray_cluster import MANIFESTS
from tests.servers import Server

OBSERVABILITY = MANIFESTS / "observability"
PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `make promtool` brings it")
METRIC = re.compile(r"\b(?:vllm|tidar):[a-z_]+")


def promtool(*words: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *words], capture_output=True, text=True, timeout=60, cwd=OBSERVABILITY, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    return read


def expressions() -> Iterator[str]:
    """The PromQL of every panel, with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((OBSERVABILITY / "rules.yml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


@needs_promtool
def test_the_rules_are_valid_and_fire_on_what_they_should() -> None:
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load((OBSERVABILITY / "rules_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


@needs_promtool
def test_the_dashboards_queries_are_promql(tmp_path: Path) -> None:
    records = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(expressions())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", str(file))


def test_every_metric_that_is_named_is_served(server: Server) -> None:
    plain_http.post(
        f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 8}, timeout=60
    ).raise_for_status()
    page = plain_http.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    served = {line.split("{")[0].split()[0] for line in page.splitlines() if not line.startswith("#")}
    # A counter with labels of its own has no series before it counts, but a type.
    served |= {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {name for expr in expressions() for name in METRIC.findall(expr)}
    named |= {name for rule in rules() for name in METRIC.findall(rule["expr"])} - recorded
    assert named <= served, named - served
    assert len(named) >= 15


def test_the_dashboard_shows_what_a_platform_team_asks_for() -> None:
    titles = {panel["title"] for panel in dashboard()["panels"]}
    assert titles >= {
        "Acceptance length",
        "Acceptance by position",
        "Rows per step",
        "Tokens per second per GPU",
        "Time to first token",
        "Time to first token, engines",
        "Requests in progress",
        "Preemptions",
        "Hand-over time",
        "Inter-token latency",
        "K/V use",
        "Replicas",
        "Stream hand-overs",
        "Responses by code",
    }
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard()["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert not any(overlap(one, other) for one in places for other in places if one is not other)


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    x, y, w, h = one
    a, b, c, d = other
    return x < a + c and a < x + w and y < b + d and b < y + h
