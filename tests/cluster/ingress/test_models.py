"""Several bases, one of them under several adapters: each on its own engine, chosen by the name that a request asks
for."""

import asyncio
import json
import threading
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.trace import NoOpTracer

from cluster.app import engine_names, replica_count
from cluster.carry.directory import Directory, Wake
from cluster.errors import ApiError
from cluster.ingress.models import SETTLE_SECONDS, SHORT_BODY, Models
from cluster.observe.ingress_metrics import IngressMetrics
from cluster.options import ServeOptions
from cluster.preflight import absolute, check_models, check_options, check_visible
from tests import plain_http
from tests.cluster.guarded import Guarded
from tests.cluster.ingress.test_api import NoReplica
from tests.servers import tiny_model
from tests.tiny import edit_json, tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.cli import named
from tidar_core.config import ConfigError
from tidar_core.engine import Engine, load_engine
from tidar_core.request import Sampling, SamplingParams
from tidar_core.settings import read_options

PROMPT = list(range(50, 90))
NAMES = ["tiny", Guarded.plain, Guarded.beside]


def complete(guarded: Guarded, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = plain_http.post(f"{guarded.url}/v1/completions", json=body, headers=guarded.headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metric(guarded: Guarded, name: str) -> dict[str, float]:
    """A metric's value by model, summed over its other labels."""
    page = plain_http.get(f"{guarded.url}/metrics", headers={"Authorization": f"Bearer {Guarded.metrics_key}"}).text
    found = defaultdict(float, dict.fromkeys(NAMES, 0.0))
    for line in page.splitlines():
        if line.startswith(name):
            found[line.split('model_name="')[1].split('"')[0]] += float(line.split()[-1])
    return found


@pytest.fixture(scope="module")
def alone(guarded: Guarded) -> dict[str, Engine]:
    """For each name an engine in this process, from the same files."""
    return {name: load_engine(replace(served.config, threads=1)) for name, served in guarded.options.served.items()}


def test_all_are_listed_the_models_own_name_first(guarded: Guarded) -> None:
    listed = plain_http.get(f"{guarded.url}/v1/models", headers=guarded.headers).json()["data"]
    assert [model["id"] for model in listed] == NAMES
    assert [model["tidar"]["block_length"] for model in listed] == [4, 0, 3]
    assert [model["max_model_len"] for model in listed] == [2048, 2048, 512]
    assert [Path(model["root"]).name for model in listed] == ["tiny", "tiny", "qwen"]
    for model in listed:
        shown = plain_http.get(f"{guarded.url}/v1/models/{model['id']}", headers=guarded.headers).json()
        assert shown == model


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_an_engine_of_its_base_says(guarded: Guarded, alone: dict[str, Engine], name: str) -> None:
    before = metric(guarded, "vllm:generation_tokens_total")
    greedy = complete(guarded, model=name, max_tokens=48)
    drawn = complete(guarded, model=name, max_tokens=48, temperature=1.0, seed=7, tidar={"drafts": "full"})
    unsaid = complete(guarded, model=name, max_tokens=48, temperature=None, seed=7)
    makers = {Guarded.beside: Sampling(0.7, 20, 0.8, repetition_penalty=1.05)}.get(name, Sampling())
    engine = alone[name]
    params = [
        SamplingParams(48, seed=7, ignore_eos=True, **asdict(sampling))
        for sampling in (makers.but(temperature=0.0), makers.but(temperature=1.0), makers, Sampling())
    ]
    answers = answer_all(engine, [tuple(PROMPT)] * 4, params)
    texts = [engine.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    assert [answer["choices"][0]["text"] for answer in (greedy, drawn, unsaid)] == texts[:3]
    assert (texts[2] == texts[3]) == (makers == Sampling()), "the makers' wishes change this answer"
    after = metric(guarded, "vllm:generation_tokens_total")
    assert {one: after[one] - before[one] for one in NAMES} == {one: 144.0 if one == name else 0.0 for one in NAMES}


def test_the_makers_wishes_are_told_and_kept_to_in_every_way_of_asking(guarded: Guarded) -> None:
    shown = plain_http.get(f"{guarded.url}/v1/models/{Guarded.beside}", headers=guarded.headers).json()
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05}
    assert shown["tidar"]["sampling_defaults"] == wanted
    _, log = guarded.server.log.read_text().split(f"{Guarded.beside} is served", 1)
    said = "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.05, where a request says nothing"
    assert log.splitlines()[3].split(maxsplit=1) == ["sampling", said]

    def ask(path: str, **fields: Any) -> Any:
        body = {"model": Guarded.beside, "seed": 5, "ignore_eos": True, **fields}
        return plain_http.post(f"{guarded.url}/v1/{path}", json=body, headers=guarded.headers, timeout=120).json()

    turn = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 40}
    texts = [ask("chat/completions", **turn, **more)["choices"][0]["message"]["content"] for more in ({}, wanted)]
    response = ask("responses", input="Who?", max_output_tokens=40)
    assert (response["temperature"], response["top_p"]) == (0.7, 0.8)
    assert {*texts, response["output"][0]["content"][0]["text"]} == {texts[0]}
    assert ask("chat/completions", **turn, temperature=1)["choices"][0]["message"]["content"] != texts[0]


def test_each_has_its_own_tokens_template_and_limit(guarded: Guarded, alone: dict[str, Engine]) -> None:
    def ask(path: str, **body: Any) -> httpx.Response:
        return plain_http.post(f"{guarded.url}{path}", json=body, headers=guarded.headers, timeout=60)

    text = "The quick brown fox asks what the answer is."
    found = {name: ask("/tokenize", model=name, prompt=text).json()["tokens"] for name in NAMES}
    assert found == {name: engine.tokenizer.encode(text) for name, engine in alone.items()}
    assert found["tiny"] != found[Guarded.beside]
    for name, tokens in found.items():
        assert ask("/detokenize", model=name, tokens=tokens).json() == {"prompt": text}
    # Beyond one vocabulary, within the other.
    assert [ask("/v1/completions", model=name, prompt=[450], max_tokens=1).status_code for name in NAMES] == [
        200, 200, 400,
    ]  # fmt: skip
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
    assert [ask("/v1/chat/completions", model=name, **chat).status_code for name in NAMES] == [200, 200, 400]
    long = {"prompt": "a", "max_tokens": 600, "temperature": 0}
    refused = ask("/v1/completions", model=Guarded.beside, **long)
    assert (refused.status_code, "512" in refused.text) == (400, True)


def test_none_reads_what_another_has_cached(guarded: Guarded) -> None:
    def cached(name: str) -> int:
        answer = complete(guarded, model=name, prompt=list(range(300, 365)), max_tokens=1)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert [cached(name) for name in NAMES] == [64, 64, 64]


def test_what_runs_is_told_for_each_name(guarded: Guarded) -> None:
    told = guarded.server.log.read_text()
    for name in NAMES:
        _, said = told.split(f"{name} is served in float32 on cpu", 1)
        assert said.splitlines()[2].split() == ["replicas", "1"]


def test_a_request_gets_the_adapter_it_asks_for_and_the_same_text(guarded: Guarded) -> None:
    drafting = complete(guarded, tidar={"drafts": "full"})
    named = complete(guarded, model="tiny", tidar={"drafts": "full"})
    plain = complete(guarded, model=Guarded.plain)
    assert [answer["model"] for answer in (drafting, named, plain)] == ["tiny", "tiny", Guarded.plain]
    assert drafting["choices"][0]["text"] == named["choices"][0]["text"] == plain["choices"][0]["text"]
    drafted = metric(guarded, "vllm:spec_decode_num_draft_tokens_total")
    assert drafted["tiny"] > 0
    assert drafted[Guarded.plain] == 0


@pytest.mark.parametrize("name", [Guarded.plain, Guarded.beside])
def test_streams_of_the_others(guarded: Guarded, name: str) -> None:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with plain_http.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=guarded.headers) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert {json.loads(line.removeprefix("data: "))["model"] for line in lines} == {name}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_name_is_told_all_that_there_are(guarded: Guarded, path: str) -> None:
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = plain_http.post(f"{guarded.url}{path}", json=body, headers=guarded.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert ", ".join(f"`{name}`" for name in NAMES) in answer.json()["error"]["message"]


def test_what_clients_got_is_told_for_each_name_and_where_there_is_none(guarded: Guarded) -> None:
    def counted() -> dict[tuple[str, str], float]:
        return {
            (name, code): count
            for code in ("200", "400", "401", "404")
            for name, count in metric(guarded, f'tidar:http_responses_total{{code="{code}"').items()
        }

    before = counted()
    complete(guarded, model=Guarded.beside)
    for name, prompt, headers in (("tiny", -1, guarded.headers), ("other", "a", guarded.headers), ("tiny", "a", {})):
        plain_http.post(f"{guarded.url}/v1/completions", json={"model": name, "prompt": prompt}, headers=headers)
    plain_http.get(f"{guarded.url}/v1/models")
    gained = {place: count - before[place] for place, count in counted().items() if count != before[place]}
    assert gained == {(Guarded.beside, "200"): 1, ("tiny", "400"): 1, ("", "404"): 1, ("", "401"): 1}
    assert metric(guarded, "tidar:engines_ready") == dict.fromkeys(NAMES, 1.0)


def two(**first: Any) -> Models:
    directories = {"one": Directory(NoReplica()), "two": Directory(NoReplica())}  # type: ignore[arg-type]
    for name, value in first.items():
        setattr(directories["one"], name, value)
    return Models(directories, ServeOptions(), IngressMetrics("here"), NoOpTracer())


def test_one_that_has_no_replica_does_not_take_the_others_down() -> None:
    made = two(_model=(SimpleNamespace(name="one"), object()), _heard={"r0": 1e18})
    assert not made.serves(), "the other one may still be coming up"
    made._began -= SETTLE_SECONDS + 1
    assert made.serves()
    assert [card.name for card in made.cards()] == ["one"]
    with pytest.raises(ApiError) as caught:
        _ = made.named("two").directory.model
    assert caught.value.status == 503
    with pytest.raises(ApiError) as caught:
        two().cards()
    assert caught.value.status == 503


def test_in_a_change_engines_are_asked_by_the_name_that_they_have() -> None:
    """As long as the new ones have not come, which they may never do: else nobody would find the old ones, and whoever
    asks for the new name would be answered by another model."""
    made = two(_model=(SimpleNamespace(name="before"), object()), _heard={"r0": 1e18})
    assert made.named("before") is made.named(None)
    with pytest.raises(ApiError) as caught:
        made.named("one")
    assert (caught.value.status, caught.value.code) == (503, "not_ready")
    with pytest.raises(ApiError, match="this server has `before`, `two`"):
        made.named("three")


def test_names_that_have_been_changed_round_find_whoever_is_there() -> None:
    """The engines of "one" were called "two", and are gone; those of "two" are up."""
    made = two(_model=(SimpleNamespace(name="two"), object()))
    made._served["two"].directory._heard = {"r1": 1e18}
    assert made.named("two").name == "two"
    made._served["one"].directory._heard = {"r0": 1e18}
    assert made.named("two").name == "two", "both are there, and one is called so by right"


def test_a_model_that_sleeps_under_an_old_name_is_woken_by_its_new_one() -> None:
    made = two(_model=(SimpleNamespace(name="before"), object()), _wake=Wake(seconds=1, most=1))
    assert made.named("one").name == "one"


def test_a_short_body_waits_behind_no_long_ones() -> None:
    async def run() -> None:
        made, may_end = two(), threading.Event()
        long = [asyncio.create_task(made.work(SHORT_BODY + 1, may_end.wait, 60)) for _ in range(64)]
        try:
            assert await asyncio.wait_for(made.work(SHORT_BODY, str, 5), 30) == "5"
            with pytest.raises(ApiError, match="does not exist"):
                await asyncio.wait_for(made.wanted(b'{"model": "none"}'), 30)
        finally:
            may_end.set()
        assert all(await asyncio.gather(*long))
        await made.stop()

    asyncio.run(run())


def test_every_name_has_its_number_of_engines_though_it_be_none() -> None:
    metrics = IngressMetrics("here")
    first, second = (Directory(NoReplica()) for _ in range(2))  # type: ignore[arg-type]
    made = Models({"one": first, "two": second}, ServeOptions(), metrics, NoOpTracer())

    def engines() -> dict[str, float]:
        samples = [sample for metric in metrics.collect() for sample in metric.samples]
        return {one.labels["model_name"]: one.value for one in samples if one.name == "tidar:engines_ready"}

    assert engines() == {"one": 0, "two": 0}, "before any replica has answered"
    first._heard = {"r0": 1e18, "r1": 1e18}
    assert engines() == {"one": 2, "two": 0}
    assert made.named("two").name == "two"


@pytest.mark.parametrize("raw", [b'{"prompt": "a"}', b'{"model": 3}'])
def test_what_names_no_model_is_for_the_first(raw: bytes) -> None:
    made = two()
    assert asyncio.run(made.wanted(raw)) == (made.named("one"), None, json.loads(raw))


OTHER = {"model": "org/other"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapters": {"base": "none"}}, "base is the name of the model itself"),
        ({"models": {"base": OTHER}}, "base is the name of the model itself"),
        ({"adapters": {"a b": "none"}}, "'a b' is no name for a model"),
        ({"models": {"/a": OTHER}}, "'/a' is no name for a model"),
        ({"adapters": {"a": "none"}, "models": {"a": OTHER}}, "a is in adapters and in models"),
        ({"adapters": {"a/b": "none", "a-b": "none"}}, "two names differ by / and - alone"),
        ({"adapters": {"a/b": "none"}, "models": {"a-b": OTHER}}, "two names differ by / and - alone"),
        ({"models": {"a": {"modle": "x"}}}, "unknown key 'models.a.modle': did you mean 'model'?"),
        ({"num_replicas": 2}, "unknown key 'num_replicas': did you mean 'replicas'?"),
        ({"kv_cache_dtype": "float8"}, "unknown key 'kv_cache_dtype': did you mean 'kv_dtype'?"),
        ({"minimum_replicas": 2}, "unknown key 'minimum_replicas': did you mean 'min_replicas'?"),
        ({"models": {"a": OTHER | {"device": "cpu"}}}, "unknown key 'models.a.device': there are model, adapter"),
        ({"models": {"a": {"adapter": "none"}}}, "models.a.model is missing"),
        ({"models": {"a": OTHER | {"replicas": 0}}}, "models.a.replicas is 0: input should be greater"),
        ({"models": {"a": OTHER | {"replicas": 2}}, "max_replicas": 2}, "models.a.replicas and max_replicas both say"),
        ({"models": {"a": OTHER | {"dtype": "int4"}}, "device": "cuda"}, "models.a: dtype int4 is for CPUs"),
        ({"models": {"a": OTHER | {"dtype": "int8"}}, "accelerator": "H100"}, "models.a: dtype int8 is for CPUs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(ServeOptions, {"name": "base", **given})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_drafts_that_are_off_without_quotes_are_off() -> None:
    """YAML reads the word as false."""
    options = read_options(ServeOptions, {"drafts": False, "models": {"a": OTHER | {"drafts": False}}})
    assert [served.config.drafts for served in options.served.values()] == ["off", "off"]
    with pytest.raises(ConfigError, match="drafts is True: input should be 'auto', 'off' or 'full'"):
        read_options(ServeOptions, {"drafts": True})


def test_every_name_has_a_deployment_of_its_own() -> None:
    options = read_options(
        ServeOptions, {"name": "org/base", "adapters": {"org/code": "none"}, "models": {"org/q": OTHER}, "replicas": 2}
    )
    assert engine_names(options) == {"org/base": "Engine", "org/code": "Engine-org-code", "org/q": "Engine-org-q"}
    assert options.most_engines == 6


def test_what_is_left_out_is_as_with_the_first() -> None:
    common = {
        "name": "one", "dtype": "float32", "kv_dtype": "float8", "drafts": "full", "max_model_len": 300, "exact": False,
        "replicas": 3, "generation_config": "none", "max_running": 128, "cache_tokens": 4096,
    }  # fmt: skip
    own = {
        "dtype": "bfloat16", "kv_dtype": "model", "drafts": "off", "max_model_len": 0, "replicas": 1, "adapter": "none",
        "generation_config": "auto", "max_running": 8, "cache_tokens": 0,
    }  # fmt: skip
    options = read_options(
        ServeOptions, {**common, "adapter": "a", "adapters": {"two": "b"}, "models": {"x": OTHER, "y": OTHER | own}}
    )
    served = options.served
    assert {name: (one.config.model, one.config.adapter, one.engines) for name, one in served.items()} == {
        "one": (options.model, "a", 3),
        "two": (options.model, "b", 3),
        "x": ("org/other", "default", 3),
        "y": ("org/other", "none", 1),
    }
    first, x, y = (served[name].config for name in ("one", "x", "y"))
    assert replace(x, model=first.model, adapter="a") == first
    assert x.kv_dtype == "float8"
    assert [(one.max_running, one.cache_tokens) for one in (first, x, y)] == [(128, 4096), (128, 4096), (8, 0)]
    assert (x.generation_config, y.generation_config) == ("none", "auto")
    stated = {"dtype": "float32", "kv_dtype": "float8", "drafts": "full", "max_model_len": 300, "max_running": 128}
    assert replace(y, **stated, adapter="default", generation_config="none", cache_tokens=4096) == x
    assert [replica_count(options, one)["num_replicas"] for one in served.values()] == [3, 3, 3, 1]
    assert options.most_engines == 10


def test_engines_that_follow_the_load_do_so_for_each_name() -> None:
    options = read_options(
        ServeOptions, {"name": "one", "min_replicas": 0, "max_replicas": 4, "models": {"other": OTHER}}
    )
    for served in options.served.values():
        scaling = replica_count(options, served)["autoscaling_config"]
        assert (scaling.min_replicas, scaling.max_replicas) == (0, 4)
    assert options.most_engines == 8


def test_paths_of_all_hold_for_processes_that_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("base", "drafter", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    models = {"x": {"model": "other", "adapter": "drafter", "replicas": 2}, "y": OTHER}
    chosen = absolute(read_options(ServeOptions, {"model": "base", "models": models}))
    assert {name: (one.config.model, one.config.adapter) for name, one in chosen.served.items()} == {
        "base": (str(tmp_path / "base"), "default"),
        "x": (str(tmp_path / "other"), str(tmp_path / "drafter")),
        "y": ("org/other", "default"),
    }
    assert chosen.models["x"].replicas == 2


def test_each_adapter_is_checked_against_its_own_base(tmp_path: Path) -> None:
    model, adapter = tiny_model(tmp_path)
    narrow = tiny_checkpoint(tmp_path / "narrow", "qwen3", hidden=48)
    fits = tiny_adapter(tmp_path / "fits", narrow)

    def options(path: Path, base: Path = narrow) -> ServeOptions:
        further = {"model": str(base), "adapter": str(path)}
        return read_options(ServeOptions, {"model": str(model), "adapter": str(adapter), "models": {"x": further}})

    def check_all(chosen: ServeOptions) -> None:
        check_models(chosen, check_options(chosen))

    for check in (check_all, check_visible):
        check(options(fits))
        with pytest.raises(ConfigError, match=r"adapter tiny-adapter does not fit: made for tiny with .* x has"):
            check(options(adapter))
    contract = tmp_path / "tidar.json"
    contract.write_text('{"mask_token_id": 3, "block_length": 4}')
    check_all(options(contract))
    contract.write_text('{"mask_token_id": 3, "block_length": 1}')
    for check in (check_all, check_visible):
        with pytest.raises(ConfigError, match="block_length is 1"):
            check(options(contract))
    edit_json(narrow / "config.json", model_type="tidar_qwen3")
    contract.write_text('{"mask_token_id": 3, "block_length": 4}')
    for check in (check_all, check_visible):
        with pytest.raises(ConfigError, match="architecture 'tidar_qwen3' is not supported"):
            check(options(contract))
    contract.write_text('{"architecture": "qwen3", "mask_token_id": 3, "block_length": 4}')
    for check in (check_all, check_visible):
        check(options(contract))
    check_visible(options(fits, tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="elsewhere"):
        check_options(options(fits, tmp_path / "elsewhere"))


def test_names_on_the_command_line() -> None:
    assert named(["a=x", "b=c:/d=e"], "--beside", "model") == {"a": "x", "b": "c:/d=e"}
    with pytest.raises(ConfigError, match=r"^--beside a names no model: write NAME=MODEL$"):
        named(["a"], "--beside", "model")
    with pytest.raises(ConfigError, match=r"^--also a= names no adapter: write NAME=ADAPTER$"):
        named(["a="], "--also", "adapter")
    with pytest.raises(ConfigError, match=r"^--beside names a twice$"):
        named(["a=x", "a=y"], "--beside", "model")
