"""A real server on a real cluster, asked as clients ask: the OpenAI package, bare HTTP, a socket that closes."""

import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from cluster.replica.replica import IDLE_SECONDS
from tests import plain_http
from tests.servers import Server

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = 2000


def with_tidar(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0, "extra_body": {"ignore_eos": True, "tidar": fields}}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event of a stream that ended with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_model_describes_itself(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve("tiny").id == model.id == "tiny"
    described = model.model_dump()
    assert described["max_model_len"] == 4096
    assert described["root"].endswith("/tiny")
    assert described["tidar"] == {
        "block_length": 4,
        "exact": described["tidar"]["exact"],
        "adapter": "tiny-adapter",
        "dtype": "float32",
        "device": "cpu",
        "drafts": "auto",
        "sampling_defaults": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        "step_cost": described["tidar"]["step_cost"],
    }
    rows, trunk, head, adapter = (
        described["tidar"]["step_cost"][name] for name in ("rows", "trunk_ms", "head_ms", "adapter_ms")
    )
    assert rows == sorted(rows)
    assert len(rows) == len(trunk) == len(head) == len(adapter) > 1
    assert min(trunk + head) > 0, "measured here, not assumed"
    assert min(adapter) >= 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="The quick", max_tokens=20, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (20, answer.usage.prompt_tokens + 20)


def test_drafts_change_the_speed_and_not_the_text(client: openai.OpenAI) -> None:
    answers = {
        drafts: client.completions.create(model="tiny", prompt="In the", max_tokens=80, **with_tidar(drafts=drafts))
        for drafts in ("off", "auto", "full")
    }
    assert len({answer.choices[0].text for answer in answers.values()}) == 1
    metrics = {drafts: answer.model_dump()["metrics"] for drafts, answer in answers.items()}
    assert metrics["off"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert metrics["off"]["tidar"]["tokens_per_step"] == 1
    assert metrics["full"]["tidar"]["tokens_per_step"] > 1
    assert metrics["full"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_a_block_limits_the_drafts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="In the", max_tokens=40, **with_tidar(drafts="full", block=2, trace=True)
    )
    drafted = answer.model_dump()["metrics"]["speculative_decoding"]["per_step_drafted"]
    assert drafted
    assert set(drafted) == {1}


def test_a_drawn_seed_repeats_its_answer(client: openai.OpenAI) -> None:
    first, second = (client.completions.create(model="tiny", prompt="a", max_tokens=40) for _ in range(2))
    seed = first.model_dump()["metrics"]["tidar"]["seed"]
    again = client.completions.create(model="tiny", prompt="a", max_tokens=40, seed=seed)
    assert again.choices[0].text == first.choices[0].text != second.choices[0].text


def test_equal_prompts_are_answered_each_for_itself(client: openai.OpenAI) -> None:
    """As those who sample many answers ask; by a seed that is given they are equal, as each is alone."""
    body: Any = {"model": "tiny", "prompt": ["a"] * 4, "max_tokens": 40, "temperature": 1}
    drawn = client.completions.create(**body)
    assert len({choice.text for choice in drawn.choices}) == 4
    first = client.completions.create(**body, seed=drawn.model_dump()["metrics"]["tidar"]["seed"])
    assert {choice.text for choice in first.choices} == {drawn.choices[0].text}


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]

    def greedy(salt: str) -> dict[str, Any]:  # no prefix of the other's, or usage would tell the two apart
        return {"temperature": 0, "extra_body": {"ignore_eos": True, "cache_salt": salt}}

    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=60, **greedy("whole"))
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        **greedy("stream"),
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].model_dump()["metrics"]["tidar"]["decode_steps"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    counted = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=60, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        **greedy("stream"),
    )  # fmt: skip
    usages = [chunk.usage for chunk in counted]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 60


def test_the_trace_tells_the_answer_step_by_step(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tidar": {"trace": True, "drafts": "full"},
    }
    *chunks, last = events(http.post("/v1/chat/completions", json=body))
    traces = [chunk["tidar"] for chunk in chunks]
    assert [trace["step"] for trace in traces] == list(range(len(traces)))
    assert [trace["t_ms"] for trace in traces] == sorted(trace["t_ms"] for trace in traces)
    spelled = [
        "".join(item["text"] for item in (*trace["drafted"][: trace["accepted"]], trace["anchor"])) for trace in traces
    ]
    shown = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(spelled).startswith("".join(shown).rstrip("�"))
    figures = last["metrics"]["speculative_decoding"]
    decoded = [trace for trace in traces if trace["drafted"]]
    assert figures["per_step_drafted"] == [len(trace["drafted"]) for trace in decoded]
    assert figures["per_step_accepted"] == [trace["accepted"] for trace in decoded]
    assert sum(trace["accepted"] + 1 for trace in traces) == last["usage"]["completion_tokens"] == 60
    for trace in traces:
        assert set(trace) == {
            *("step", "t_ms", "drafted", "accepted", "anchor", "block", "proposals", "used", "rows", "replica")
        }
        assert trace["used"] is None or {"a": trace["used"]} in trace["proposals"]
        assert trace["rows"]["mask"] == trace["block"] * len(trace["proposals"])


def test_without_a_trace_there_is_none(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "stream": True}
    chunks = events(http.post("/v1/completions", json=body))
    assert all("tidar" not in chunk and "usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_prompts_of_a_list_are_choices_of_their_own(client: openai.OpenAI) -> None:
    prompts = ["The quick", "In the beginning", "def add("]
    alone = [client.completions.create(model="tiny", prompt=prompt, max_tokens=30, **GREEDY) for prompt in prompts]
    expected = [answer.choices[0].text for answer in alone]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=30, **GREEDY)
    assert [choice.text for choice in together.choices] == expected
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage is not None
    assert together.usage.completion_tokens == 90
    texts = ["", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, max_tokens=30, stream=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_known_prefix_is_reused_but_not_across_salts(client: openai.OpenAI, server: Server) -> None:
    def counted(name: str) -> float:
        page = plain_http.get(f"{server.url}/metrics").text
        return sum(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{"))

    names = ("prefix_cache_queries", "prefix_cache_hits")
    before = [counted(name) for name in names]
    prompt = list(range(100, 180))

    def cached(salt: str) -> int:
        body = {"ignore_eos": True, "cache_salt": salt}
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body=body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(salt) for salt in ("one", "one", "two", "two")] == [0, 64, 0, 64]
    assert [counted(name) - old for name, old in zip(names, before, strict=True)] == [4 * 80, 2 * 64]


def test_choices_have_noise_of_their_own_and_the_first_is_the_single_answer(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": "The lazy", "max_tokens": 30, "seed": 5, "temperature": 1.0}
    body["extra_body"] = {"ignore_eos": True}
    single = client.completions.create(**body)
    several = client.completions.create(n=3, **body)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts[0] == single.choices[0].text
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert single.usage is not None
    assert several.usage.prompt_tokens == single.usage.prompt_tokens
    assert several.usage.completion_tokens == 90


def test_there_may_be_128_choices_each_the_same_beside_fewer(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": "The lazy", "max_tokens": 2, "seed": 5, "temperature": 1.0}
    body["extra_body"] = {"ignore_eos": True}
    few, many = (client.completions.create(n=n, **body) for n in (16, 128))
    assert [choice.index for choice in many.choices] == list(range(128))
    assert [choice.text for choice in many.choices[:16]] == [choice.text for choice in few.choices]
    assert many.usage is not None
    assert many.usage.completion_tokens == 256
    with pytest.raises(openai.BadRequestError, match="128"):
        client.completions.create(n=129, **body)


def test_bias_and_penalties_reach_the_token_rule(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": "The quick", "max_tokens": 30}
    plain = client.completions.create(**body, **GREEDY)
    forced = client.completions.create(**body, logit_bias={"300": 100}, **GREEDY)
    assert len(set(forced.choices[0].text.split())) <= 1 != len(set(plain.choices[0].text.split()))
    varied = client.completions.create(**body, frequency_penalty=2, presence_penalty=2, **GREEDY)
    assert varied.choices[0].text != plain.choices[0].text
    for bias in ({"99999": 1}, {"one": 1}, {"5": 1000}):
        with pytest.raises(openai.BadRequestError, match="logit"):
            client.completions.create(**body, logit_bias=bias)


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "She sells sea shells 🙂"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].startswith("<|im_start|>user")
    assert http.post("/detokenize", json={"tokens": [99999]}).status_code == 400


class LongStream(threading.Thread):
    """A long greedy answer, read while other things happen."""

    def __init__(self, client: openai.OpenAI, tokens: int):
        super().__init__()
        self.text = ""
        self.begun = threading.Event()
        self._client = client
        self._tokens = tokens

    def run(self) -> None:
        for chunk in self._client.completions.create(
            model="tiny", prompt="Once", max_tokens=self._tokens, stream=True, **GREEDY
        ):
            self.text += chunk.choices[0].text
            self.begun.set()


BAD: list[tuple[str, bytes, int, str | None]] = [
    ("/v1/completions", b"{bad", 400, None),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400, None),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400, None),
    ("/v1/completions", json.dumps({"prompt": "a " * 10_000}).encode(), 400, "context_length_exceeded"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 4096}', 400, "context_length_exceeded"),
    ("/v1/chat/completions", b'{"messages": [], "max_tokens": 3}', 400, None),
    ("/v1/completions", b'{"prompt": "a", "model": "gpt-17"}', 404, "model_not_found"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "model": ""}', 404, "model_not_found"),
    ("/v1/embeddings", b"{}", 404, "not_found"),
    ("/v1/completions", b"x" * (8 * 1024 * 1024 + 1), 413, "body_too_large"),
]


def test_bad_requests_are_told_so_and_disturb_nobody(client: openai.OpenAI, http: httpx.Client) -> None:
    expected = client.completions.create(model="tiny", prompt="Once", max_tokens=LONG, **GREEDY).choices[0].text
    for _ in range(3):  # a stream may end before the bad requests do
        stream = LongStream(client, LONG)
        stream.start()
        assert stream.begun.wait(60)
        for path, body, status, code in BAD:
            response = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
            assert "\n" not in error["message"]
            assert "Traceback" not in response.text
        during = stream.is_alive()
        stream.join(120)
        assert stream.text == expected
        if during:
            return
    raise AssertionError("each stream ended before the bad requests did: they ran beside nothing")


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert (caught.value.param, caught.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize(("stream", "apart"), [(True, False), (False, False), (False, True)])
def test_a_client_that_goes_away_frees_its_request(server: Server, stream: bool, apart: bool) -> None:
    """apart: the body comes behind the headers, as many clients write it."""
    aborted = server.metric("vllm:request_success_total")
    left = server.metric("tidar:http_responses_total", code="499")
    generated = server.metric("vllm:generation_tokens_total")
    wanted = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    body = json.dumps(wanted).encode()
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        lines = ("Host: tidar", "Content-Type: application/json", f"Content-Length: {len(body)}")
        head = "\r\n".join(("POST /v1/completions HTTP/1.1", *lines, "", ""))
        connection.sendall(head.encode())
        if apart:
            time.sleep(0.05)
        connection.sendall(body)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        until(lambda: server.metric("vllm:num_requests_running") == 1)
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:request_success_total") == aborted + 1
    until(lambda: server.metric("tidar:http_responses_total", code="499") == left + 1)
    assert server.metric("tidar:requests_in_progress") == 0
    assert server.metric("vllm:generation_tokens_total") - generated < 4000


def test_who_goes_away_takes_no_other_stream_along(server: Server) -> None:
    """All streams come by one call, which whoever was first has made."""
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    handovers = server.metric("tidar:stream_handovers_total")
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    time.sleep(2 * IDLE_SECONDS)  # the call of the tests before is over
    with (
        httpx.Client(base_url=server.url, timeout=60) as one,
        httpx.Client(base_url=server.url, timeout=60) as two,
        one.stream("POST", "/v1/completions", json=body) as first,
    ):
        assert next(first.iter_lines()).startswith("data: ")
        with two.stream("POST", "/v1/completions", json={**body, "max_tokens": 1500}) as second:
            lines = second.iter_lines()
            assert next(lines).startswith("data: ")
            first.close()
            until(lambda: server.metric("vllm:num_requests_running") <= 1)  # the second may be over by then
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert server.metric("tidar:stream_handovers_total") == handovers


def until(holds: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_page_and_the_health_are_there(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/").headers["location"] == "playground/"
    page = http.get("/playground/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


def test_the_metrics_page_agrees_with_the_answers(server: Server, client: openai.OpenAI) -> None:
    names = (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "tidar:decode_steps_total",
    )
    before = [server.metric(name) for name in names]
    answer = client.completions.create(model="tiny", prompt="In", max_tokens=50, **with_tidar(drafts="full"))
    metrics = answer.model_dump()["metrics"]
    figures = metrics["speculative_decoding"]
    brought = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert brought == [
        figures["num_spec_steps"],
        figures["num_accepted_draft_tokens"],
        metrics["tidar"]["decode_steps"],
    ]
