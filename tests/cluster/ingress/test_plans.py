"""What a body asks for, worked out once, and where no stream waits for it."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from cluster.card import tokenizer_backend
from cluster.carry.directory import Directory
from cluster.errors import ApiError, bad_request
from cluster.ingress import plans
from cluster.ingress.api import build_api
from cluster.ingress.plans import RequestPlan, chat_plan, completion_plan, input_tokens, responses_plan
from cluster.options import ServeOptions
from cluster.wire import sampling
from cluster.wire.answer import Echo
from cluster.wire.prompts import decode
from tests.cluster.ingress.test_api import NoReplica, ask
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, thinking_tokenizer, tiny_tokenizer, tool_tokenizer

CARD = card_for(tiny_tokenizer())
BACKEND = tokenizer_backend(CARD)


def completion(**fields: Any) -> RequestPlan:
    return completion_plan(fields, CARD, BACKEND)


def test_each_choice_has_its_prompt_a_seed_and_what_stands_before_it() -> None:
    plan = completion(prompt=[[300, 301], [302]], n=3, echo=True, seed=None, logit_bias={"300": 5, "301": -5})
    assert plan.prompts == [(300, 301)] * 3 + [(302,)] * 3
    assert [params.choice for params in plan.params] == [0, 1, 2] * 2
    first, second = plan.params[0].seed, plan.params[3].seed
    assert [params.seed for params in plan.params] == [first] * 3 + [second] * 3
    assert second == (first + 1) % 2**plans.SEED_BITS
    assert all(params.logit_bias is plan.params[0].logit_bias for params in plan.params), "made once for all"
    echoes = [Echo(decode(BACKEND, prompt), prompt[0], None, False) for prompt in ((300, 301), (302,))]
    assert plan.echoes == [echoes[0]] * 3 + [echoes[1]] * 3
    assert completion(prompt="a", seed=4).params[0].seed == 4


def test_bad_words_are_the_tokens_that_they_have_in_front_of_a_text_and_behind_a_space() -> None:
    def tokens(text: str) -> tuple[int, ...]:
        return tuple(BACKEND.encode(text, add_special_tokens=False).ids)

    plan = completion(prompt=["a", "b"], n=2, bad_words=["the", " the", " queen", "\n"])
    expected = [tokens("the"), tokens(" the"), tokens("queen"), tokens(" queen"), tokens("\n")]
    assert len({*expected}) == 5
    assert plan.params[0].bad_words == tuple(expected)
    assert all(params.bad_words is plan.params[0].bad_words for params in plan.params), "made once for all"
    assert completion(prompt="a", bad_words=[]).params[0].bad_words == ()
    asked = responses_plan({"input": "a", "bad_words": ["the"]}, CARD, BACKEND, reasoning=False)
    assert asked.params[0].bad_words == (tokens("the"), tokens(" the"))
    with pytest.raises(ApiError, match="a word must not be empty"):
        completion(prompt="a", bad_words=["the", ""])


def test_bad_words_have_no_more_tokens_than_each_choice_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    def spelt(count: int) -> str:
        """A word of so many tokens, in front of a text; behind a space it has one more."""
        word = "\ue000"
        each = len(BACKEND.encode(word, add_special_tokens=False).ids)
        assert (each, count % each) == (3, 0)
        return word * (count // each)

    (first, second) = completion(prompt="a", bad_words=[spelt(30)]).params[0].bad_words
    assert (len(first), len(second)) == (30, 31)
    with pytest.raises(ApiError, match=r"bad_words: .* has 33 tokens, and a word may have 32 at most: shorten it"):
        completion(prompt="a", bad_words=["the", spelt(33)])
    monkeypatch.setattr(sampling, "BAD_WORDS_TOKENS", 61)
    assert len(completion(prompt="a", bad_words=[spelt(30)] * 3).params[0].bad_words) == 2, "once each"
    with pytest.raises(ApiError, match=r"may have 61 tokens at most, .*: send fewer or shorter ones") as caught:
        completion(prompt="a", bad_words=[spelt(30), "\n"])
    assert (caught.value.status, caught.value.param) == (400, "bad_words")


def test_what_each_choice_carries_is_short() -> None:
    for field, value in (("cache_salt", "s" * 257), ("bad_words", ["the", "s" * 257])):
        with pytest.raises(ApiError, match=f"{field}.*at most 256 characters") as caught:
            completion(prompt="a", **{field: value})
        assert caught.value.status == 400
    completion(prompt="a", cache_salt="s" * 256)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": 10}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 10}, "logprobs"),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 10}, "prompt_logprobs"),
    ],
)
def test_a_prompt_has_no_more_log_probabilities_than_can_be_sent_at_once(
    fields: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[300] * 9, [301] * 20]
    monkeypatch.setattr(plans, "MOST_LOGPROBS_OF_A_PROMPT", 20 * 11)
    completion(prompt=prompts, max_tokens=1, **fields)
    completion(prompt=prompts, max_tokens=1, logprobs=20)
    monkeypatch.setattr(plans, "MOST_LOGPROBS_OF_A_PROMPT", 20 * 11 - 1)
    with pytest.raises(ApiError, match=f"{field} 10 is too much .*: of 20 tokens there may be 9 at most") as caught:
        completion(prompt=prompts, max_tokens=1, **fields)
    assert (caught.value.status, caught.value.param) == (400, field)


def chat(**fields: Any) -> RequestPlan:
    return chat_plan({"messages": [{"role": "user", "content": "Who?"}], **fields}, CARD, BACKEND, reasoning=False)


@pytest.mark.parametrize(
    ("make", "fields", "asked", "field"),
    [
        (
            completion,
            {"prompt": [[300] * 9, [301] * 20], "prompt_logprobs": 10, "n": 2},
            2 * 29 * 11,
            "prompt_logprobs",
        ),
        (completion, {"prompt": [[300] * 9] * 3, "echo": True, "logprobs": 4, "stream": True}, 3 * 9 * 5, "logprobs"),
        (completion, {"prompt": [[300] * 9] * 3, "echo": True, "logprobs": 4, "max_tokens": 0}, 3 * 9 * 5, "logprobs"),
    ],
)
def test_a_request_has_no_more_log_probabilities_than_can_be_kept(
    make: Any, fields: dict[str, Any], asked: int, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its prompts; those of answers are counted as they come."""
    monkeypatch.setattr(plans, "MOST_LOGPROBS", asked)
    make(**fields)
    monkeypatch.setattr(plans, "MOST_LOGPROBS", asked - 1)
    with pytest.raises(ApiError, match=f"{asked - 1} log-probabilities at most, these would be {asked}: ") as caught:
        make(**fields)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_log_probabilities_that_are_not_kept_or_may_never_come_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_LOGPROBS", 10)
    completion(prompt="a", logprobs=4, max_tokens=20, stream=True)
    completion(prompt="a", logprobs=4, max_tokens=20)
    chat(logprobs=True, top_logprobs=5, n=4)
    with pytest.raises(ApiError, match="maximum context length"):
        chat(logprobs=True, max_tokens=10**9)


def test_an_answer_that_goes_on_with_a_text_or_is_held_to_one_keeps_its_first_space() -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"}]

    def of_chat(**fields: Any) -> bool:
        return chat_plan({"messages": turns, **fields}, CARD, BACKEND, reasoning=False).params[0].mid_text

    assert not of_chat()
    assert of_chat(continue_final_message=True, add_generation_prompt=False)
    assert of_chat(structured_outputs={"choice": [" yes", " no"]})
    strict = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
    tools = card_for(tool_tokenizer(HERMES_TEMPLATE), max_model_len=2048)
    plan = chat_plan({"messages": turns, "tools": [strict]}, tools, tokenizer_backend(tools), reasoning=False)
    assert plan.params[0].grammar is not None
    assert not plan.params[0].mid_text, "only its calls are held to anything"
    assert completion(prompt="a").params[0].mid_text


def test_thoughts_are_limited_where_an_answer_may_begin_with_them() -> None:
    card = card_for(thinking_tokenizer())

    def limited(reasoning: bool = True, **fields: Any) -> bool:
        asked = {"messages": [{"role": "user", "content": "Who?"}], "thinking_token_budget": 5, **fields}
        return chat_plan(asked, card, tokenizer_backend(card), reasoning).params[0].thought_limit is not None

    form = {"response_format": {"type": "json_object"}}
    assert limited()
    assert limited(**form)
    assert limited(tidar={"trace": True})
    assert limited(reasoning=False)
    assert not limited(reasoning=False, **form), "what it has to follow leaves room for none"
    assert not limited(chat_template_kwargs={"enable_thinking": False})
    assert not limited(thinking_token_budget=-1)


def test_more_choices_than_are_taken_are_refused() -> None:
    with pytest.raises(ApiError, match="prompts times n may be at most 256") as caught:
        completion(prompt=["a"] * 17, n=16)
    assert (caught.value.status, caught.value.param) == (400, "n")


def test_only_an_object_of_the_responses_api_repeats_what_was_asked() -> None:
    turn = {"messages": [{"role": "user", "content": "Who?"}], "max_completion_tokens": 7}
    chat = chat_plan(turn, CARD, BACKEND, reasoning=True)
    asked = responses_plan({"input": "Who?", "max_output_tokens": 7}, CARD, BACKEND, True)
    assert (chat.prompts, chat.params[0].max_tokens) == (asked.prompts, asked.params[0].max_tokens)
    assert chat.repeated is None
    assert asked.repeated is not None
    assert json.loads(asked.repeated)["max_output_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        (
            {"max_output_tokens": 5, "min_tokens": 10},
            "min_tokens must lie between 0 and max_output_tokens",
            "min_tokens",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1", "max_output_tokens"),
        ({"messages": []}, "messages is a field of chats: use input", "messages"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_asked(fields: dict[str, Any], said: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        responses_plan({"input": "Who?", **fields}, CARD, BACKEND, reasoning=True)
    assert (caught.value.message, caught.value.param) == (said, param)


def test_the_tokens_of_an_input_are_those_of_the_prompt_that_an_answer_has() -> None:
    card = replace(card_for(tool_tokenizer(HERMES_TEMPLATE)), max_model_len=512)
    backend = tokenizer_backend(card)
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    whole = {"input": "Who?", "instructions": "Be brief.", "tools": [weather], "max_output_tokens": 5}
    counts = []
    for left_out in ("tools", "instructions", None):
        body = {name: value for name, value in whole.items() if name != left_out}
        counts.append(input_tokens(body, card, backend)["input_tokens"])
        assert counts[-1] == len(responses_plan(body, card, backend, reasoning=True).prompts[0])
    assert len(set(counts)) == 3
    assert input_tokens(whole, card, backend)["object"] == "response.input_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": []}, "messages"), ({"input": "1" * 9000}, "input"), ({"documents": ["a"]}, "documents")],
)
def test_an_input_that_is_not_answered_is_not_counted(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        input_tokens({"input": "Who?", **fields}, CARD, BACKEND)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_it_is_worked_out_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[threading.Thread] = []

    def noted(*_: Any) -> Any:
        asked.append(threading.current_thread())
        raise bad_request("noted")

    async def awake(_: Directory) -> Any:
        return CARD, BACKEND

    monkeypatch.setattr(Directory, "awake", awake)
    monkeypatch.setattr(plans, "sampling_params", noted)
    monkeypatch.setattr(plans, "echoes_of", noted)
    api = build_api({"tiny": Directory(NoReplica())}, ServeOptions())  # type: ignore[arg-type]
    assert ask(api, "POST", "/v1/completions", json={"prompt": "a"}).json()["error"]["message"] == "noted"
    mixed_up = ask(api, "POST", "/v1/responses", json={"input": "a", "messages": []})
    assert mixed_up.json()["error"]["message"] == "messages is a field of chats: use input"
    assert len(asked) == 1
    assert asked[0] is not threading.main_thread()
