"""A real server's answers that end at what the request named: a stop string, or a token by its id."""

from typing import Any

import httpx
import openai
import pytest

from tests.cluster.test_server import GREEDY, events

GREEDY_BODY = {"temperature": 0, "ignore_eos": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "The"}]},
    COMPLETIONS: {"prompt": "The"},
}


def test_stops_end_an_answer_and_are_not_in_it(client: openai.OpenAI, http: httpx.Client) -> None:
    text = client.completions.create(model="tiny", prompt="The", max_tokens=60, **GREEDY).choices[0].text
    stop = text[20:23]
    stopped = client.completions.create(model="tiny", prompt="The", max_tokens=60, stop=[stop, "\0"], **GREEDY)
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_dump()["stop_reason"] == stop
    shown = {"prompt": "The", "max_tokens": 60, "stop": [stop, "\0"], "include_stop_str_in_output": True, **GREEDY_BODY}
    for drafts in ("off", "full"):
        (choice,) = http.post("/v1/completions", json=shown | {"tidar": {"drafts": drafts}}).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text[: text.index(stop)] + stop, stop)
        streamed = events(http.post("/v1/completions", json=shown | {"tidar": {"drafts": drafts}, "stream": True}))
        assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    body = {"prompt": "The", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop_token_ids": tokens}
    ended = http.post("/v1/completions", json=body).json()
    assert ended["usage"]["completion_tokens"] == 1
    assert ended["choices"][0]["text"] == ""
    assert ended["choices"][0]["stop_reason"] in tokens


def test_only_allowed_tokens_come_and_special_ones_are_a_part_of_the_text_where_they_shall_be(
    http: httpx.Client,
) -> None:
    """A token of `stop_token_ids` and the end of sequence are none, special or not."""
    letters = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    body = {"prompt": "The", "max_tokens": 40, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    body["allowed_token_ids"] = [*letters, 1, 2, 0]
    (hidden,) = http.post("/v1/completions", json=body).json()["choices"]
    assert {1, 2, *letters} >= set(hidden["token_ids"]) - {0}
    assert set(hidden["token_ids"]) & {0, 1, 2}
    assert set(hidden["text"]) <= set("abc")
    body["skip_special_tokens"] = False
    for drafts in ("off", "full"):
        asked = body | {"tidar": {"drafts": drafts}}
        (shown,) = http.post("/v1/completions", json=asked).json()["choices"]
        assert shown["token_ids"] == hidden["token_ids"]
        assert shown["text"] == http.post("/detokenize", json={"tokens": shown["token_ids"]}).json()["prompt"]
        assert "<|im_" in shown["text"]
        (stopped,) = http.post("/v1/completions", json=asked | {"stop": "<|im_"}).json()["choices"]
        assert (stopped["text"], stopped["stop_reason"]) == (shown["text"].partition("<|im_")[0], "<|im_")
    for end in ({"stop_token_ids": [2]}, {"ignore_eos": False}):
        (ended,) = http.post("/v1/completions", json=body | end).json()["choices"]
        assert ended["finish_reason"] == "stop"
        assert ended["text"] == http.post("/detokenize", json={"tokens": ended["token_ids"][:-1]}).json()["prompt"]
        whole = body | end | {"include_stop_str_in_output": True, "stream": True, "tidar": {"trace": True}}
        told = events(http.post("/v1/completions", json=whole))
        text = "".join(event["choices"][0]["text"] for event in told)
        assert text == http.post("/detokenize", json={"tokens": ended["token_ids"]}).json()["prompt"]
        steps = [event["tidar"] for event in told]
        tokens = [token for step in steps for token in (*step["drafted"][: step["accepted"]], step["anchor"])]
        assert "".join(token["text"] for token in tokens if token) == text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_words_do_not_come(http: httpx.Client, path: str) -> None:
    """Three that are a token each of the answer that there would be, and one of two tokens behind these."""
    ids, texts = zip(*spelled(http, path), strict=True)
    whole = [place for place in range(4, 50) if texts[place].strip().isalpha()][:3]
    pair = next(place for place in range(whole[-1] + 1, 58) if "".join(texts[place : place + 2]).isalpha())
    words = [*(texts[place] for place in whole), "".join(texts[pair : pair + 2])]
    refused = [http.post("/tokenize", json={"prompt": word}).json()["tokens"] for word in words]
    body = BODIES[path] | {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    told = []
    for drafts in ("off", "full"):
        asked = body | {"bad_words": words, "tidar": {"drafts": drafts}}
        (choice,) = http.post(path, json=asked).json()["choices"]
        told.append(choice["token_ids"])
    assert told[0] == told[1] != list(ids)
    for word in refused:
        assert not any(told[0][place : place + len(word)] == word for place in range(60))


def test_what_cannot_be_allowed_is_refused(http: httpx.Client) -> None:
    for path, fields, said in (
        (COMPLETIONS, {"bad_words": [""]}, "a word must not be empty"),
        (COMPLETIONS, {"bad_words": ["a"] * 1025}, "at most 1024 items"),
        (CHAT, {"allowed_token_ids": [5], "bad_words": ["a"]}, "cannot be combined with bad_words"),
        (COMPLETIONS, {"allowed_token_ids": []}, "at least 1 item"),
        (COMPLETIONS, {"allowed_token_ids": [10**30]}, "is no token id of this model"),
        (CHAT, {"allowed_token_ids": [2], "min_tokens": 3}, "no token that an answer could begin with"),
        (CHAT, {"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, "cannot be combined"),
        (CHAT, {"skip_special_tokens": False, "tools": [LOOK]}, "cannot be combined with tools"),
    ):
        answer = http.post(path, json=BODIES[path] | {"max_tokens": 5} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
        assert said in answer.json()["error"]["message"]


def spelled(http: httpx.Client, path: str) -> list[tuple[int, str]]:
    """The tokens of a greedy answer and the text that each of them adds."""
    body = BODIES[path] | {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    told = events(http.post(path, json=body | {"tidar": {"trace": True, "drafts": "off"}}))
    return [(event["tidar"]["anchor"]["id"], event["tidar"]["anchor"]["text"]) for event in told]


def said(path: str, choice: dict[str, Any]) -> str:
    if path == COMPLETIONS:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta"))["content"] or "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_token_that_ends_an_answer_counts_and_its_text_is_no_part_of_it(http: httpx.Client, path: str) -> None:
    """Nor does its text complete a stop string: the token alone has ended the answer then."""
    ids, texts = zip(*spelled(http, path), strict=True)
    place = next(n for n in range(9, 60) if ids[n] not in ids[:n] and texts[n].isalpha())
    stop, before = ids[place], "".join(texts[:place])
    body = BODIES[path] | {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    (shown,) = http.post(path, json=body | {"include_stop_str_in_output": True}).json()["choices"]
    with_it = http.post("/detokenize", json={"tokens": ids[: place + 1]}).json()["prompt"]
    assert (said(path, shown), shown["stop_reason"]) == (with_it, stop)
    for stops in ([], [before[-2:] + texts[place]]):
        body["stop"] = stops
        whole = http.post(path, json=body).json()
        (choice,) = whole["choices"]
        assert (said(path, choice), choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
        assert whole["usage"]["completion_tokens"] == place + 1
        *chunks, counted = events(
            http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
        )
        assert "".join(said(path, chunk["choices"][0]) for chunk in chunks) == before
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        assert counted["usage"]["completion_tokens"] == place + 1
