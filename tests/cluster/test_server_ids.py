"""A real server's answers with the ids of their tokens, whole and streamed."""

from typing import Any

import httpx
import pytest

from tests.cluster.guarded import Guarded
from tests.cluster.test_server import events
from tests.cluster.test_server_stops import BODIES, CHAT, COMPLETIONS, spelled
from tests.cluster.wire.test_thoughts import forced
from tests.cluster.wire.test_tools import TOOLS

ASKED = {"return_token_ids": True, "max_tokens": 30, "seed": 5, "temperature": 1}


def by_choice(chunks: list[Any], choices: int) -> list[list[int]]:
    told: list[list[int]] = [[] for _ in range(choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            told[choice["index"]] += choice["token_ids"]
    return told


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "ignore_eos": True},
        {"stop": ["e", "a"], "n": 2},
        {"logit_bias": {"2": 6}},
        {"logprobs": True, "ignore_eos": True},
        {"tidar": {"trace": True, "drafts": "full"}, "ignore_eos": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_stream_tells_the_ids_of_the_whole_answer(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    if path == COMPLETIONS and "logprobs" in fields:
        fields = fields | {"logprobs": 0}
    body = BODIES[path] | ASKED | fields
    whole = http.post(path, json=body).json()
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert sum(map(len, ids)) == whole["usage"]["completion_tokens"]
    chunks = events(http.post(path, json=body | {"stream": True}))
    assert by_choice(chunks, len(ids)) == ids
    if "trace" in fields.get("tidar", {}):
        steps = [chunk["tidar"] for chunk in chunks]
        held = [
            [token["id"] for token in step["drafted"][: step["accepted"]]] + [step["anchor"]["id"]] for step in steps
        ]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == held
    asked = http.post("/tokenize", json=BODIES[path]).json()["tokens"]
    if path == CHAT:
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == asked
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        return
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [asked] * len(ids)
    with_prompt = [chunk["choices"][0] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    assert sorted(choice["index"] for choice in with_prompt) == list(range(len(ids)))
    assert all(choice["prompt_token_ids"] == asked for choice in with_prompt)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_ids_are_those_that_the_model_said(http: httpx.Client, path: str) -> None:
    """With the one that ended the answer, or completed a stop string."""
    ids, texts = zip(*spelled(http, path), strict=True)
    place = next(n for n in range(9, 60) if ids[n] not in ids[:n] and texts[n].isalpha())
    body = BODIES[path] | {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    end = "".join(texts[place - 3 : place + 1])
    assert end not in "".join(texts[:place])
    for how in ({"stop_token_ids": [ids[place]]}, {"stop": [end]}, {"max_tokens": place + 1}):
        (choice,) = http.post(path, json=body | how).json()["choices"]
        assert choice["token_ids"] == list(ids[: place + 1])
        chunks = events(http.post(path, json=body | how | {"stream": True}))
        assert by_choice(chunks, 1) == [list(ids[: place + 1])]


def test_a_repeated_prompt_is_none_of_the_answers_tokens(http: httpx.Client) -> None:
    prompts = ["The quick", "In the beginning"]
    asked = [http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    body = {"prompt": prompts, **ASKED, "ignore_eos": True}
    ids = [choice["token_ids"] for choice in http.post(COMPLETIONS, json=body).json()["choices"]]
    for logprobs in (None, 1):
        for most, expected in ((30, ids), (0, [[], []])):
            echoed = body | {"echo": True, "logprobs": logprobs, "max_tokens": most}
            whole = http.post(COMPLETIONS, json=echoed).json()["choices"]
            assert [choice["token_ids"] for choice in whole] == expected
            assert [choice["prompt_token_ids"] for choice in whole] == asked
            chunks = events(http.post(COMPLETIONS, json=echoed | {"stream": True}))
            assert by_choice(chunks, 2) == expected


def test_ids_of_thoughts_and_calls_are_told_too(guarded: Guarded) -> None:
    turns = [{"role": "user", "content": "Well?"}]
    common = {"messages": turns, "return_token_ids": True, "seed": 7}
    thinks = common | {"model": guarded.beside, "max_tokens": 60, "temperature": 0, **forced()["extra_body"]}
    calls = common | {"model": "tiny", "max_tokens": 400, "tools": TOOLS, "tool_choice": "required", "n": 2}
    with httpx.Client(base_url=guarded.url, headers=guarded.headers, timeout=120) as http:
        for body, what in ((thinks, "reasoning_content"), (calls, "tool_calls")):
            whole = http.post(CHAT, json=body).raise_for_status().json()
            assert all(choice["message"][what] for choice in whole["choices"])
            ids = [choice["token_ids"] for choice in whole["choices"]]
            assert sum(map(len, ids)) == whole["usage"]["completion_tokens"]
            assert by_choice(events(http.post(CHAT, json=body | {"stream": True})), len(ids)) == ids


def test_nobody_is_told_ids_unasked(http: httpx.Client) -> None:
    for path, asked in BODIES.items():
        for extra in ({}, {"return_token_ids": None}, {"return_token_ids": False}):
            for stream in (True, False):
                body = asked | {"max_tokens": 3, "stream": stream, **extra}
                assert "token_ids" not in http.post(path, json=body).raise_for_status().text
