"""One base under several adapters: each on its own engine, chosen by the name that a request asks for."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.trace import NoOpTracer

from cluster.app import engine_names
from cluster.directory import Directory
from cluster.errors import ApiError
from cluster.metrics import IngressMetrics
from cluster.models import SETTLE_SECONDS, Models
from cluster.options import ServeOptions
from tests.cluster.guarded import Guarded
from tests.cluster.test_api import NoReplica
from tidar_core.config import ConfigError
from tidar_core.settings import read_options

PROMPT = list(range(50, 90))


def complete(guarded: Guarded, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=guarded.headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_all_are_listed_the_models_own_name_first(guarded: Guarded) -> None:
    listed = httpx.get(f"{guarded.url}/v1/models", headers=guarded.headers).json()["data"]
    assert [model["id"] for model in listed] == ["tiny", Guarded.plain]
    assert [model["tidar"]["block_length"] for model in listed] == [4, 0]
    shown = httpx.get(f"{guarded.url}/v1/models/{Guarded.plain}", headers=guarded.headers).json()
    assert shown == listed[1]


def test_a_request_gets_the_adapter_it_asks_for_and_the_same_text(guarded: Guarded) -> None:
    drafting = complete(guarded, tidar={"drafts": "full"})
    named = complete(guarded, model="tiny", tidar={"drafts": "full"})
    plain = complete(guarded, model=Guarded.plain)
    assert [answer["model"] for answer in (drafting, named, plain)] == ["tiny", "tiny", Guarded.plain]
    assert drafting["choices"][0]["text"] == named["choices"][0]["text"] == plain["choices"][0]["text"]
    page = httpx.get(f"{guarded.url}/metrics", headers={"Authorization": f"Bearer {Guarded.metrics_key}"}).text
    rows = {
        line.split('model_name="')[1].split('"')[0]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("tidar:rows_total") and 'kind="mask"' in line
    }
    assert rows["tiny"] > 0
    assert rows[Guarded.plain] == 0


def test_streams_and_tokens_of_the_other_one(guarded: Guarded) -> None:
    body = {"model": Guarded.plain, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=guarded.headers) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert {json.loads(line.removeprefix("data: "))["model"] for line in lines} == {Guarded.plain}
    counted = httpx.post(
        f"{guarded.url}/tokenize", json={"model": Guarded.plain, "prompt": "one two"}, headers=guarded.headers
    )
    assert counted.json()["count"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_name_is_told_all_that_there_are(guarded: Guarded, path: str) -> None:
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{guarded.url}{path}", json=body, headers=guarded.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert f"tiny, {Guarded.plain}" in answer.json()["error"]["message"]


def two(**first: Any) -> Models:
    directories = {"one": Directory(NoReplica()), "two": Directory(NoReplica())}  # type: ignore[arg-type]
    for name, value in first.items():
        setattr(directories["one"], name, value)
    return Models(directories, ServeOptions(), IngressMetrics("here"), NoOpTracer())


def test_one_that_has_no_replica_does_not_take_the_others_down() -> None:
    made = two(_card=SimpleNamespace(name="one"), _backend=object(), _heard={"r0": 1e18})
    assert not made.serves(), "the other one may still be coming up"
    made._began -= SETTLE_SECONDS + 1
    assert made.serves()
    assert [card.name for card in made.cards] == ["one"]
    with pytest.raises(ApiError) as caught:
        _ = made.named("two").directory.model
    assert caught.value.status == 503
    with pytest.raises(ApiError) as caught:
        _ = two().cards
    assert caught.value.status == 503


@pytest.mark.parametrize("raw", [b'{"prompt": "a"}', b'{"model": 3}', b"[]"])
def test_what_names_no_model_is_for_the_first(raw: bytes) -> None:
    made = two()
    assert asyncio.run(made.wanted(raw)) is made.named("one")


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        ({"base": "none"}, "base is the name of the model itself"),
        ({"a b": "none"}, "'a b' is no name for a model"),
        ({"a/b": "none", "a-b": "none"}, "differ by / and - alone"),
    ],
)
def test_names_that_cannot_be_are_refused(adapters: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(ServeOptions, {"name": "base", "adapters": adapters})


def test_every_adapter_has_a_deployment_of_its_own() -> None:
    options = ServeOptions(name="org/base", adapters={"org/code": "none", "chat": "none"}, replicas=2)
    assert engine_names(options) == {"org/base": "Engine", "org/code": "Engine-org-code", "chat": "Engine-chat"}
    assert options.most_engines == 6
