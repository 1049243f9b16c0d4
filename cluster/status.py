"""`tidar status`: what a running server serves and how it fares, read over HTTP alone."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from tidar_core.config import ConfigError

Series = Mapping[str, Mapping[str, float]]


def show_status(address: str, key: str | None = None, console: Console | None = None) -> None:
    """Print the model and a row a replica; `key` is sent where one is given.

    Raises ConfigError where nothing answers at `address`.
    """
    console = console or Console()
    base = address.rstrip("/")
    answer = fetch(f"{base}/v1/models", key)
    try:
        model = answer.json()["data"][0]
        about = model["tidar"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"what answers at {base} is no TiDAR server: give the address of `tidar up`") from None
    head = Table.grid(padding=(0, 2))
    rows = {
        "model": model["id"],
        "loaded from": model["root"],
        "runs in": f"{about['dtype']} on {about['device']}, {'exact' if about['exact'] else 'not exact'}",
        "drafter": f"{about['adapter']}, block length {about['block_length']}" if about["adapter"] else "none",
        "drafts": about["drafts"],
        "context": f"{model['max_model_len']} tokens",
    }
    for name, value in rows.items():
        head.add_row(name, str(value))
    console.print(head, highlight=False)
    console.print(replica_table(by_replica(fetch(f"{base}/metrics", key).text)))


def fetch(url: str, key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url, timeout=10, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"nothing answers at {url} ({error}): is `tidar up` running there?") from None
    if response.status_code != 200:
        raise ConfigError(f"{url} answers {response.status_code}: {message_of(response)}")
    return response


def message_of(response: httpx.Response) -> str:
    try:
        body: Any = response.json()
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def by_replica(page: str) -> dict[str, dict[str, float]]:
    """The samples of a metrics page by replica and name, series of one name summed over their other labels."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "engine" in sample.labels:
                found[sample.labels["engine"]][sample.name] += sample.value
    return found


def replica_table(replicas: Series) -> Table:
    """Load and acceptance, a row a replica."""
    table = Table("replica", "running", "waiting", "K/V used", "tokens", "tokens/step", "drafts held")
    for name, values in sorted(replicas.items()):
        steps, drafted = values["tidar:decode_steps_total"], values["vllm:spec_decode_num_draft_tokens_total"]
        table.add_row(
            name,
            f"{values['vllm:num_requests_running']:.0f}",
            f"{values['vllm:num_requests_waiting']:.0f}",
            f"{values['vllm:kv_cache_usage_perc']:.1%}",
            f"{values['vllm:generation_tokens_total']:.0f}",
            f"{values['tidar:decode_tokens_total'] / steps:.2f}" if steps else "-",
            f"{values['vllm:spec_decode_num_accepted_tokens_total'] / drafted:.1%}" if drafted else "-",
        )
    return table
