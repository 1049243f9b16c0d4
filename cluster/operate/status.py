"""`tidar status`: what a running server serves and how it fares, read over HTTP alone."""

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tidar_core.config import ConfigError

SLEEPS = "tidar:model_sleeps"
FIRST_SECONDS, LIVE_SECONDS = 0.5, 1.0  # between two looks, for the tokens per second

Series = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Shortage:
    """A name for which no replica answers, or fewer than there shall be at least: whether it only sleeps, and how many
    requests it has."""

    engines: int
    wanted: int
    sleeps: bool
    waiting: float

    def words(self) -> str:
        if self.engines:
            return f"has {self.engines} of {self.wanted} engines: `serve status` says what the others wait for"
        wait = f"{self.waiting:g} {'request waits' if self.waiting == 1 else 'requests wait'} for it"
        if self.sleeps:
            return f"is woken: {wait}" if self.waiting else "sleeps: the next request wakes it"
        return "has no replica that answers" + (f": {wait}" if self.waiting else "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all replicas counted at a moment (seconds of one clock), and what each serves. short: the names for
    which too few answer."""

    moment: float
    replicas: Series
    models: Mapping[str, str] = field(default_factory=dict)
    short: Mapping[str, Shortage] = field(default_factory=dict)


def show_status(
    address: str,
    key: str | None = None,
    metrics_key: str | None = None,
    live: bool = False,
    console: Console | None = None,
) -> None:
    """Print the model and a row a replica. key: sent where one is given; metrics_key: in its place for the metrics.
    live: go on until Ctrl-C.

    Raises ConfigError where nothing answers at `address`.
    """
    console = console or Console()
    base = (address if "://" in address else f"http://{address}").rstrip("/")
    console.print(model_table(base, key), highlight=False)
    metrics_key = metrics_key or key
    before = look(base, metrics_key)
    time.sleep(FIRST_SECONDS)
    now = look(base, metrics_key)
    if not live:
        console.print(replica_table(now, before))
        return
    with Live(replica_table(now, before), console=console, auto_refresh=False) as shown, suppress(KeyboardInterrupt):
        while True:
            time.sleep(LIVE_SECONDS)
            try:
                before, now = now, look(base, metrics_key)
            except ConfigError as error:
                shown.update(Text(f"{error}"), refresh=True)  # it may come back
                continue
            shown.update(replica_table(now, before), refresh=True)


def model_table(base: str, key: str | None) -> Table:
    """What is served at an address. Raises ConfigError where that is no TiDAR server."""
    answer = fetch(f"{base}/v1/models", key)
    head = Table.grid(padding=(0, 2))
    try:
        for model in answer.json()["data"]:
            about = model["tidar"]
            rows = {
                "model": model["id"],
                "loaded from": model["root"],
                "runs in": f"{about['dtype']} on {about['device']}, {'exact' if about['exact'] else 'not exact'}",
                "drafter": f"{about['adapter']}, block length {about['block_length']}" if about["adapter"] else "none",
                "drafts": about["drafts"],
                "context": f"{model['max_model_len']} tokens",
            }
            for name, value in rows.items():
                head.add_row(name, escape(str(value)))
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"what answers at {base} is no TiDAR server: give the address of `tidar up`") from None
    if not head.row_count:
        raise ConfigError(f"what answers at {base} serves no model")
    return head


def look(base: str, key: str | None) -> Snapshot:
    """What the metrics page says now. Raises ConfigError."""
    page = fetch(f"{base}/metrics", key).text
    return read_page(page, time.monotonic())


def fetch(url: str, key: str | None) -> httpx.Response:
    """What a running server answers there to whoever has the key. Raises ConfigError where nothing does, or it says
    no."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key holds a character that no header can carry: write it in ASCII")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # No proxy that the environment names reaches this machine's own addresses. What TLS is verified by takes 50 ms
        # of a core to read.
        where = httpx.URL(url)
        trust, verify = not is_loopback(where.host), where.scheme == "https"
        response = httpx.get(where, timeout=10, headers=headers, trust_env=trust, verify=verify)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"nothing answers at {url} ({error}): is `tidar up` running there?") from None
    if response.status_code != 200:
        raise ConfigError(f"{url} answers {response.status_code}: {message_of(response)}")
    return response


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def message_of(response: httpx.Response) -> str:
    try:
        body: Any = response.json()
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def read_page(page: str, moment: float) -> Snapshot:
    """The samples of a metrics page by replica and name, series of one name summed over their other labels."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    models: dict[str, str] = {}
    told: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # of each name, by the ingresses
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "engine" in sample.labels:
                found[sample.labels["engine"]][sample.name] += sample.value
                models[sample.labels["engine"]] = sample.labels["model_name"]
            elif "model_name" in sample.labels:
                told[sample.labels["model_name"]][sample.name].append(sample.value)
    shortages = {name: shortage(series, name in models.values()) for name, series in told.items() if SLEEPS in series}
    short = {name: one for name, one in shortages.items() if not one.engines or one.engines < one.wanted}
    return Snapshot(moment, found, models, short)


def shortage(series: Mapping[str, list[float]], answers: bool) -> Shortage:
    """How a name stands by all that the ingresses say of it, and by whether any of its replicas answers now."""
    return Shortage(
        engines=max(1, int(max(series["tidar:engines_ready"], default=1))) if answers else 0,
        wanted=int(max(series["tidar:engines_wanted"], default=0)),  # older servers do not say
        sleeps=all(series[SLEEPS]),
        waiting=sum(series["tidar:requests_in_progress"]),
    )


def replica_table(now: Snapshot, before: Snapshot | None = None) -> Table:
    """Load, speed and acceptance: a row a replica, and one for all; where there are several models, each replica's own
    stands behind its name, and above them all those models that have too few. What is counted is that between two looks
    where anything happened there, else all since the replica started."""
    names = sorted(now.replicas)
    title = "\n".join(f"{escape(name)} {shortage.words()}" for name, shortage in now.short.items()) or None
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)  # narrow enough for 80 columns
    for heading in ("replica", "running", "waiting", "K/V", "tokens", "tokens/s", "tokens/step", "held"):
        table.add_column(heading, justify="left" if heading == "replica" else "right")
    several = len({*now.models.values(), *now.short}) > 1
    for name in names:
        table.add_row(
            escape(f"{name} {now.models[name]}" if several else name),
            *cells([name], now, before),
            end_section=name == names[-1],
        )
    if len(names) > 1:
        table.add_row("all", *cells(names, now, before))
    return table


def cells(names: list[str], now: Snapshot, before: Snapshot | None) -> list[str]:
    """A row of the table, for all these replicas together."""
    old = before.replicas if before is not None else {}

    def total(series: str) -> float:
        return sum(now.replicas[name].get(series, 0.0) for name in names)

    def gained(series: str) -> float:
        return sum(now.replicas[name].get(series, 0.0) - old.get(name, {}).get(series, 0.0) for name in names)

    def share(part: str, whole: str) -> float | None:
        counted = gained if gained(whole) > 0 else total
        return counted(part) / counted(whole) if counted(whole) else None

    speed = None
    if before is not None and all(name in old for name in names):
        speed = gained("vllm:generation_tokens_total") / (now.moment - before.moment)
    per_step = share("tidar:decode_tokens_total", "tidar:decode_steps_total")
    held = share("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    return [
        f"{total('vllm:num_requests_running'):.0f}",
        f"{total('vllm:num_requests_waiting'):.0f}",
        f"{total('vllm:kv_cache_usage_perc') / len(names):.1%}",
        f"{total('vllm:generation_tokens_total'):.0f}",
        "-" if speed is None else f"{speed:.1f}",
        "-" if per_step is None else f"{per_step:.2f}",
        "-" if held is None else f"{held:.1%}",
    ]
