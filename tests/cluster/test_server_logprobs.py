"""Log-probabilities of answers and of prompts, as OpenAI and vLLM give them, from a real server."""

from typing import Any

import httpx
import openai
import pytest

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def test_log_probabilities_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="The quick", max_tokens=12, logprobs=2, **GREEDY)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    for best, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True):
        assert max(best.values()) == own  # greedy: the token is the likeliest
    messages: Any = [{"role": "user", "content": "Who?"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    entries = [
        entry
        for chunk in chat
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    spoken = bytes(byte for entry in entries for byte in entry.bytes or ())
    same = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **GREEDY)
    assert spoken.decode(errors="replace") == same.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(model="tiny", messages=messages, top_logprobs=3)


def test_a_prompt_is_repeated_with_its_log_probabilities_whole_and_streamed(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "max_tokens": 6, "logprobs": 2, "seed": 2}
    prompts: Any = {"text": "The quick größe", "ids": [300, 5, 301], "one": [300]}
    for prompt in prompts.values():
        plain = client.completions.create(prompt=prompt, **body)
        echoed = client.completions.create(prompt=prompt, echo=True, n=2, **body)
        given = (
            prompt
            if isinstance(prompt, str)
            else client.completions.create(
                prompt=prompt, echo=True, model="tiny", max_tokens=1, logit_bias={"300": 100}, temperature=0
            )
            .choices[0]
            .text.removesuffix(plain_text_of(client, 300))
        )
        assert echoed.choices[0].text == given + plain.choices[0].text
        logprobs, answer = echoed.choices[0].logprobs, plain.choices[0].logprobs
        assert logprobs is not None
        assert answer is not None
        known = len(logprobs.tokens or []) - 6
        assert (logprobs.tokens or [])[known:] == answer.tokens
        assert (logprobs.token_logprobs or [])[known:] == answer.token_logprobs
        assert (logprobs.token_logprobs or [])[0] is None
        assert (logprobs.top_logprobs or [])[0] is None
        assert all(value < 0 for value in (logprobs.token_logprobs or [])[1:])
        assert (logprobs.text_offset or [])[0] == 0
        streamed: list[Any] = [[], []]
        for chunk in client.completions.create(prompt=prompt, echo=True, n=2, stream=True, **body):
            streamed[chunk.choices[0].index].append(chunk.choices[0])
        for chunks, whole in zip(streamed, echoed.choices, strict=True):
            assert "".join(one.text for one in chunks) == whole.text
            assert whole.logprobs is not None
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                told = [item for one in chunks for item in getattr(one.logprobs, name)]
                assert told == getattr(whole.logprobs, name)
    again = client.completions.create(prompt="The quick größe", echo=True, model="tiny", max_tokens=1)
    assert again.choices[0].logprobs is None
    assert again.choices[0].text.startswith("The quick größe")


def test_a_prompt_may_be_read_alone(client: openai.OpenAI) -> None:
    """`echo` with no token to generate, as those ask who score texts."""
    body: Any = {"model": "tiny", "prompt": "The quick größe", "echo": True, "logprobs": 2, "temperature": 0}
    alone = client.completions.create(max_tokens=0, **body)
    further = client.completions.create(max_tokens=1, **body)
    assert alone.choices[0].text == body["prompt"]
    assert alone.choices[0].finish_reason == "length"
    assert alone.usage is not None
    assert (alone.usage.completion_tokens, alone.usage.total_tokens) == (0, alone.usage.prompt_tokens)
    assert alone.choices[0].logprobs is not None
    assert further.choices[0].logprobs is not None
    read, more = alone.choices[0].logprobs.model_dump(), further.choices[0].logprobs.model_dump()
    assert len(read["tokens"]) == alone.usage.prompt_tokens
    for name, told in read.items():
        assert told == more[name][:-1]
    assert all(token in best for token, best in zip(read["tokens"][1:], read["top_logprobs"][1:], strict=True))
    (chunk,) = client.completions.create(max_tokens=0, stream=True, **body)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == (body["prompt"], "length")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(max_tokens=0, **body | {"echo": False})


def test_an_unlikely_token_is_among_its_own_top_logprobs(client: openai.OpenAI) -> None:
    said = client.completions.create(model="tiny", prompt="a", max_tokens=12, temperature=2, seed=1, logprobs=1)
    logprobs = said.choices[0].logprobs
    assert logprobs is not None
    rows = zip(logprobs.tokens or [], logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True)
    assert all(best[token] == own and len(best) <= 2 for token, own, best in rows)
    assert any(len(best) == 2 for best in logprobs.top_logprobs or [])


def plain_text_of(client: openai.OpenAI, token: int) -> str:
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=1, temperature=0, logit_bias={str(token): 100}
    )
    return answer.choices[0].text


def test_prompt_log_probabilities_in_vllms_form(http: httpx.Client) -> None:
    prompt = http.post("/tokenize", json={"prompt": "In the beginning there was"}).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 1}
    first, second = (http.post("/v1/completions", json=body).json()["choices"][0] for _ in range(2))
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    nothing, *told = first["prompt_logprobs"]
    assert nothing is None
    for token, entry in zip(prompt[1:], told, strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert {one["rank"] for one in entry.values()} == {1, entry[str(token)]["rank"]}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    for wrong in ({"stream": True}, {"prompt_logprobs": 21}):
        refused = http.post("/v1/completions", json=body | wrong)
        assert (refused.status_code, "prompt_logprobs" in refused.text) == (400, True)


@pytest.mark.parametrize(("logprobs", "of_prompt"), [(5, 0), (1, 4)])
def test_an_echoed_prompt_has_as_many_of_the_likeliest_as_its_answer(
    http: httpx.Client, logprobs: int, of_prompt: int
) -> None:
    body = {"prompt": "In the", "max_tokens": 2, "echo": True, "logprobs": logprobs, "prompt_logprobs": of_prompt}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    nothing, *told = choice["logprobs"]["top_logprobs"]
    assert nothing is None
    assert all(logprobs <= len(one) <= logprobs + 1 for one in told)
    assert all(of_prompt <= len(one) <= of_prompt + 1 for one in choice["prompt_logprobs"][1:])


def test_scoring_asks_nothing_of_the_answer(http: httpx.Client) -> None:
    """With max_tokens 0 there is none that a least length or a form could hold for."""
    body = {"prompt": "In the", "max_tokens": 0, "echo": True, "logprobs": 0}
    plain = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    held = body | {"min_tokens": 2, "structured_outputs": {"regex": "[0-9]+"}}
    assert http.post("/v1/completions", json=held).json()["choices"][0]["logprobs"] == plain


def test_several_prompts_are_told_the_seeds_that_make_their_answers_anew(http: httpx.Client) -> None:
    body = {"prompt": ["In the", "On a"], "max_tokens": 6, "temperature": 1}
    answer = http.post("/v1/completions", json=body).json()
    seeds = answer["metrics"]["tidar"]["seeds"]
    for choice, prompt, seed in zip(answer["choices"], body["prompt"], seeds, strict=True):
        again = http.post("/v1/completions", json=body | {"prompt": prompt, "seed": seed}).json()
        assert again["choices"][0]["text"] == choice["text"]
        assert again["metrics"]["tidar"]["seed"] == seed


def test_the_token_that_ends_a_completion_has_a_log_probability(client: openai.OpenAI) -> None:
    """Evaluations count on as many as there are tokens; in a chat OpenAI tells none of it."""
    ends: Any = {"model": "tiny", "logit_bias": {"2": 100}, "temperature": 0, "max_tokens": 4}
    said = client.completions.create(prompt="a", logprobs=1, echo=True, **ends)
    logprobs = said.choices[0].logprobs
    assert logprobs is not None
    assert said.usage is not None
    assert (said.choices[0].text, said.choices[0].finish_reason, said.usage.completion_tokens) == ("a", "stop", 1)
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == said.usage.total_tokens
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], logprobs=True, **ends)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content == []
