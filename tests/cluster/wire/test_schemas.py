"""Request bodies: what is read, what is ignored, what is refused by name."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cluster.card import ModelCard, tokenizer_backend
from cluster.errors import ApiError
from cluster.wire.prompts import chat_prompt, completion_prompts, encode, parse_json, read_body
from cluster.wire.sampling import logit_bias, sampling_params
from cluster.wire.schemas import (
    INSTEAD,
    UNSUPPORTED,
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    refuse_unsupported,
)
from tests.tiny import tiny_tokenizer
from tidar_core.request import Sampling


def card_for(tokenizer: PreTrainedTokenizerFast, max_model_len: int = 64) -> ModelCard:
    return ModelCard(
        name="tiny",
        root="/models/tiny",
        created=0,
        fingerprint="f1",
        adapter="drafter",
        dtype="float32",
        device="cpu",
        exact=True,
        block_length=4,
        max_model_len=max_model_len,
        page_size=16,
        vocab_size=512,
        eos_ids=(2, 0),
        drafts="auto",
        sampling_defaults=Sampling(),
        step_cost={"rows": [1], "trunk_ms": [1.0], "head_ms": [0.1], "adapter_ms": [0.0]},
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return card_for(tiny_tokenizer())


def completion(**fields: Any) -> CompletionBody:
    return read_body({"prompt": "a", **fields}, CompletionBody)


def chat(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "a"}]
    return read_body({"messages": messages, **fields}, ChatBody)


def refused(call: Any, *arguments: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **fields)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


def test_defaults_are_openais(card: ModelCard) -> None:
    params = sampling_params(completion(), card, 10, seed=5)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (16, 1.0, 0, 1.0, 0.0)
    assert (params.seed, params.drafts, params.block, params.stop) == (5, "auto", None, ())
    assert sampling_params(completion(), card, 60, seed=5).max_tokens == 4
    assert sampling_params(chat(), card, 10, seed=5).max_tokens == 54


QWEN = Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05)


def picked_by(body: Body, card: ModelCard) -> Sampling:
    params = sampling_params(body, card, 3, 1)
    return Sampling(**{field.name: getattr(params, field.name) for field in fields(Sampling)})


@pytest.mark.parametrize("make", [completion, chat])
def test_what_is_left_out_is_as_the_models_makers_want_it(make: Any, card: ModelCard) -> None:
    qwen = replace(card, sampling_defaults=QWEN)
    assert picked_by(make(), qwen) == QWEN
    assert picked_by(make(temperature=None, top_k=None, top_p=None), qwen) == QWEN
    assert picked_by(make(repetition_penalty=1, min_p=0), qwen) == replace(QWEN, repetition_penalty=1.0, min_p=0.0)
    for off in (0, -1):
        assert picked_by(make(top_k=off), qwen) == replace(QWEN, top_k=0)
    greedy = sampling_params(make(temperature=0), qwen, 3, 1)
    assert (greedy.temperature, greedy.repetition_penalty) == (0.0, 1.05)
    assert picked_by(make(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1), qwen) == Sampling()
    assert picked_by(make(), replace(card, sampling_defaults=Sampling(top_k=10**6))).top_k == card.vocab_size


def test_what_the_makers_want_is_told_of_the_model(card: ModelCard) -> None:
    told: Any = replace(card, sampling_defaults=QWEN).describe()["tidar"]
    assert json.loads(json.dumps(told["sampling_defaults"])) == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05
    }  # fmt: skip


def test_null_is_the_same_as_leaving_out(card: ModelCard) -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens")
    empty = completion(**dict.fromkeys((*names, "ignore_eos", "stream", "stream_options", "tidar", "model", "n")))
    assert sampling_params(empty, card, 3, 1) == sampling_params(completion(), card, 3, 1)
    assert not completion(tidar={"trace": None}).tidar.trace
    backend = tokenizer_backend(card)
    special = [completion_prompts(completion(add_special_tokens=given), card, backend) for given in (None, True)]
    assert special == [completion_prompts(completion(), card, backend)] * 2


def test_every_field_arrives(card: ModelCard) -> None:
    body = completion(
        max_tokens=7,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-3,
        stop="END",
        stop_token_ids=[9, 8],
        min_tokens=2,
        ignore_eos=True,
        tidar={"drafts": "full", "block": 3, "draft_trust": 1, "trace": True},
    )
    params = sampling_params(body, card, 10, seed=5)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.0, 0.9, 40, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (-3, ("END",), frozenset({8, 9}))
    assert (params.min_tokens, params.ignore_eos, params.drafts, params.block) == (2, True, "full", 3)
    assert body.tidar.trace


def test_vllms_top_k_of_minus_one_keeps_everything(card: ModelCard) -> None:
    assert sampling_params(completion(top_k=-1), card, 3, 1).top_k == 0
    assert sampling_params(completion(top_k=10**12), card, 3, 1).top_k == card.vocab_size


def test_newer_name_of_max_tokens_wins(card: ModelCard) -> None:
    assert sampling_params(chat(max_tokens=3, max_completion_tokens=5), card, 3, 1).max_tokens == 5
    assert refused(sampling_params, chat(max_completion_tokens=0), card, 3, 1).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [511, 512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"tidar": {"draft_trust": 1.5}}, "tidar.draft_trust"),
        ({"tidar": {"draft_trust": 0.5, "drafts": "off"}}, "tidar.draft_trust"),
    ],
)
def test_values_out_of_range_are_named(card: ModelCard, fields: dict[str, Any], param: str) -> None:
    assert refused(sampling_params, completion(**fields), card, 3, 1).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"tidar": {"speed": 3}}, "tidar.speed"),
        ({"tidar": {"drafts": "some"}}, "tidar.drafts"),
        ({"tidar": {"block": 0}}, "tidar.block"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_wrong_shapes_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_fields_of_a_chat_that_do_not_go_together_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0"),
        ({"role": "function", "content": "a"}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "messages.0.tool_calls.0.id"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages.0.content"),
        ({"role": "user", "refusal": "no"}, "messages.0"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], param: str) -> None:
    assert refused(chat, messages=[message]).param == param


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function: Field required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type: Input should be 'function'"),
        ({"tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tool_choice": 1}, "tool_choice: must be none, auto, required or an object that names a function"),
        ({"stop": 5}, "stop: must be a string or a list of strings"),
        ({"response_format": "json_object"}, "response_format: must be an object"),
        ({"messages": ["a"]}, "messages.0: must be an object"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content: each content part must be an object"),
    ],
)
def test_of_a_wrong_shape_is_said_what_it_must_be(fields: dict[str, Any], said: str) -> None:
    assert refused(chat, **fields).message.startswith(said)


def test_what_the_assistant_refused_is_what_it_said() -> None:
    parts = [{"type": "text", "text": "Well"}, {"type": "refusal", "refusal": "no"}]
    for turn, said in (({"refusal": "no", "content": None}, "no"), ({"content": parts}, "Well\nno")):
        (message,) = chat(messages=[{"role": "assistant", **turn}]).messages
        assert message.for_template() == {"role": "assistant", "content": said}


def test_a_prompt_that_leaves_no_room(card: ModelCard) -> None:
    for error, param in (
        (refused(sampling_params, completion(), card, 64, 1), "prompt"),
        (refused(sampling_params, chat(), card, 70, 1), "messages"),
        (refused(sampling_params, completion(max_tokens=30), card, 40, 1), "max_tokens"),
    ):
        assert (error.code, error.param) == ("context_length_exceeded", param)
        assert "64" in error.message


def test_the_last_position_can_be_used(card: ModelCard) -> None:
    assert sampling_params(completion(max_tokens=24), card, 40, 1).max_tokens == 24


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    for neutral in (None, *UNSUPPORTED[name]):
        refuse_unsupported(completion(**{name: neutral}))
    error = refused(refuse_unsupported, completion(**{name: {"a": "value"}}))
    assert error.param == name
    assert name in error.message
    assert ("use `" in error.message) == (name in INSTEAD)


@pytest.mark.parametrize("name", ["repetition_detection", "logprob_token_ids", "json_schema"])
def test_what_other_servers_know_is_not_passed_over(name: str) -> None:
    assert refused(refuse_unsupported, chat(**{name: 5})).param == name


def test_a_limit_of_another_endpoint_is_not_passed_over() -> None:
    """Else the answer would be cut at 16 tokens, or not at all."""
    for error in (refused(completion, max_completion_tokens=99), refused(chat, max_output_tokens=99)):
        assert "use max_tokens" in error.message
    assert completion(max_completion_tokens=9, max_tokens=9).limit == 9, "as clients send it that know both"
    assert chat(max_completion_tokens=9, max_output_tokens=9).limit == 9


@pytest.mark.parametrize("name", sorted(set(INSTEAD.values())))
def test_what_is_named_instead_is_known(name: str) -> None:
    assert name in ChatBody.model_fields


def test_echo_is_for_completions() -> None:
    with pytest.raises(ApiError) as caught:
        chat(echo=True)
    assert (caught.value.status, caught.value.param) == (400, "echo")
    assert chat(echo=False).wanted_of_prompt is None
    assert completion(echo=True).wanted_of_prompt is None
    assert completion(echo=True, logprobs=2).wanted_of_prompt == 2
    assert completion(echo=True, logprobs=2, prompt_logprobs=1).wanted_of_prompt == 2
    assert completion(logprobs=2, prompt_logprobs=1).wanted_of_prompt == 1


def test_zero_logprobs_is_a_wish_for_logprobs(card: ModelCard) -> None:
    def wanted(body: CompletionBody | ChatBody) -> int | None:
        return sampling_params(body, card, 4, 1).logprobs

    assert (wanted(completion(logprobs=0)), wanted(completion())) == (0, None)
    assert (wanted(chat(logprobs=True)), wanted(chat(logprobs=False))) == (0, None)
    assert wanted(chat(logprobs=True, top_logprobs=5)) == 5
    assert refused(sampling_params, completion(logprobs=21), card, 4, 1).param == "logprobs"
    error = refused(sampling_params, chat(logprobs=True, top_logprobs=21), card, 4, 1)
    assert (error.param, error.message.split()[0]) == ("top_logprobs", "top_logprobs")


def test_unknown_fields_are_ignored_and_known() -> None:
    body = completion(reasoning="hard", user="me", store=False, n=1)
    refuse_unsupported(body)
    assert body.ignored == ["reasoning"]


@pytest.mark.parametrize(
    "raw",
    [
        b"{bad",
        b"",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b"[1]",
        b"null",
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    assert refused(parse_json, raw).param is None


def test_surrogate_pairs_are_text() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


@given(
    st.dictionaries(
        st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields, "n", "tools", "strange"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_any_object_is_a_body_or_a_bad_request(value: dict[str, Any]) -> None:
    card = card_for(TOKENIZER)
    backend = tokenizer_backend(card)
    raw = json.dumps(value).encode()
    for kind in (CompletionBody, ChatBody, TokenizeBody):
        status = 200
        try:
            body = read_body(parse_json(raw), kind)
            if isinstance(body, CompletionBody):
                refuse_unsupported(body)
                for prompt in completion_prompts(body, card, backend):
                    sampling_params(body, card, len(prompt), 1)
            elif isinstance(body, ChatBody):
                sampling_params(body, card, len(chat_prompt(body, card, backend)[0]), 1)
        except ApiError as error:
            status = error.status
        assert status in (200, 400)


TOKENIZER = tiny_tokenizer()


def test_prompts_of_every_shape(card: ModelCard) -> None:
    backend = tokenizer_backend(card)
    ids = encode(backend, "The quick", special=True)
    assert completion_prompts(completion(prompt="The quick"), card, backend) == [ids]
    assert completion_prompts(completion(prompt=list(ids)), card, backend) == [ids]
    assert completion_prompts(completion(prompt=["The quick", "a"]), card, backend)[0] == ids
    assert completion_prompts(completion(prompt=[list(ids), [1]]), card, backend) == [ids, (1,)]


def test_prompts_that_cannot_be_run(card: ModelCard) -> None:
    backend = tokenizer_backend(card)
    for prompt in ("", ["a", ""], [512], [[-1]]):
        assert refused(completion_prompts, completion(prompt=prompt), card, backend).param == "prompt"


def test_chat_goes_through_the_models_template(card: ModelCard) -> None:
    backend = tokenizer_backend(card)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
    asked, _ = chat_prompt(chat(messages=messages), card, backend)
    assert backend.decode(list(asked), skip_special_tokens=False) == expected + "<|im_start|>assistant\n"
    plain, _ = chat_prompt(chat(messages=messages, add_generation_prompt=False), card, backend)
    assert backend.decode(list(plain), skip_special_tokens=False) == expected


def test_a_model_without_a_template_says_what_to_do() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    card = card_for(tokenizer)
    assert "/v1/completions" in refused(chat_prompt, chat(), card, tokenizer_backend(card)).message


def test_a_template_that_refuses_is_the_clients_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    card = card_for(tokenizer)
    assert "roles must alternate" in refused(chat_prompt, chat(), card, tokenizer_backend(card)).message


def test_what_was_asked_for_reaches_the_engine_in_its_own_terms(card: ModelCard) -> None:
    off = replace(card, drafts="off")
    assert sampling_params(completion(tidar={"draft_trust": 0.5}), off, 3, 1).drafts == "full"
    assert sampling_params(completion(), off, 3, 1).drafts == "off"
    assert sampling_params(completion(tidar={"block": 99}), card, 3, 1).block == card.block_length
    assert sampling_params(completion(tidar={"block": 2}), replace(card, block_length=0), 3, 1).block == 1
    for token in ("007", "+7", " 7", "512", "-1", "٧"):
        assert refused(logit_bias, {token: 1}, card.vocab_size).param == "logit_bias"


def test_usage_in_every_chunk_is_told_only_where_usage_is() -> None:
    for usage in (True, False, None):
        options = {"include_usage": usage, "continuous_usage_stats": True}
        assert completion(stream=True, stream_options=options).continuous_usage == bool(usage)
