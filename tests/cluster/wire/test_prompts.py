"""Bodies to token ids: nothing that a client may send holds up the others, or is more than a 400."""

import json
import threading
import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tokenizers import processors

from cluster.card import ModelCard, tokenizer_backend
from cluster.errors import ApiError, unknown_model
from cluster.wire.prompts import (
    chat_prompt,
    completion_prompts,
    decode,
    encode,
    encode_end,
    most_tokens,
    parse_json,
    read_body,
    render_chat,
)
from cluster.wire.responses_asked import ResponsesBody
from cluster.wire.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, refuse_unsupported
from tests.cluster.wire.test_schemas import card_for, chat, completion, refused
from tests.tiny import END_OF_TEXT, HERMES_TEMPLATE, tiny_tokenizer, tool_tokenizer

MANY = 100_000
TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
        (ChatBody, {"messages": [TURN], "tools": [1] * MANY}),
        (ChatBody, {"messages": [TURN], "tidar": dict.fromkeys(map(str, range(MANY)), 1)}),
        (ChatBody, {"messages": [TURN], "structured_outputs": dict.fromkeys(map(str, range(MANY)), 1)}),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [""] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
        (DetokenizeBody, {"tokens": [""] * MANY}),
    ],
)
def test_a_body_that_is_wrong_all_over_is_refused_for_its_first_faults(kind: type[BaseModel], body: Any) -> None:
    """Each fault that is found is a dict, of which the client hears one: a few megabytes took gigabytes."""
    with pytest.raises(ApiError) as refused:
        read_body(body, kind)
    assert refused.value.status == 400
    assert "\n" not in refused.value.message
    found = refused.value.__cause__
    assert isinstance(found, ValidationError)
    assert found.error_count() < 2000


def test_other_threads_run_while_a_long_prompt_is_tokenized() -> None:
    backend = tokenizer_backend(card_for(tool_tokenizer()))
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    ids = encode(backend, text, False)
    assert ids == tuple(backend.encode(text, add_special_tokens=False).ids)
    assert decode(backend, ids) == backend.decode(list(ids), skip_special_tokens=False) == text
    over = threading.Event()
    looks: list[float] = []

    def look() -> None:
        while not over.is_set():
            looks.append(time.monotonic())
            time.sleep(0.002)

    looker = threading.Thread(target=look)
    looker.start()
    while not looks:
        time.sleep(0.001)
    began = time.monotonic()
    for _ in range(3):
        encode(backend, text, False)
    took = time.monotonic() - began
    over.set()
    looker.join()
    during = [moment for moment in looks if moment >= began]
    assert len(during) > 9, f"{len(during)} looks in {took:.2f} s: one a call, where it holds up all threads"


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a":' + "[" * 700 + "]" * 700 + "}", '{"a":' + "[" * 9000 + "]" * 9000 + "}"]
)
def test_what_a_client_says_that_a_model_called_is_no_fault_of_the_server(arguments: str) -> None:
    card = card_for(tool_tokenizer(HERMES_TEMPLATE))
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
    raw = json.dumps({"messages": [TURN, {"role": "assistant", "tool_calls": [call]}]}).encode()
    with pytest.raises(ApiError) as refused:
        encode(tokenizer_backend(card), render_chat(card, read_body(parse_json(raw), ChatBody)), False)
    assert refused.value.status == 400
    assert "\n" not in refused.value.message


def called(arguments: str) -> ChatBody:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[TURN, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        ("{", "{}"),
        ('{"city": "Kö', '{"city": "Kö"}'),
        ('{"city": "Ulm", "days"', '{"city": "Ulm"}'),
        ('{"a": {"b": [1, ', '{"a": {"b": [1]}}'),
    ],
)
def test_a_call_that_was_cut_off_is_told_as_far_as_it_goes(cut: str, told: str) -> None:
    """Agents send back what an answer was that came to its limit within a call, LangGraph's for one."""
    assert f'"name": "f", "arguments": {told}}}' in render_chat(card_for(tool_tokenizer(HERMES_TEMPLATE)), called(cut))


@pytest.mark.parametrize(
    "arguments", ["[1, ", '{"a": no', '{"a": 1}}', '"{', "{'a", '{"a": "\\ud800"', '{"a": "\ud800', " ", "tru", "-"]
)
def test_what_begins_no_object_is_no_call_that_was_cut_off(arguments: str) -> None:
    with pytest.raises(ApiError, match="JSON object"):
        called(arguments)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"seed": ' + b"7" * 5000 + b"}", "the body has a number of too many digits"),
        (b'{"top_p": NaN}', "the body is not JSON: NaN is not a JSON number"),
        (b'{"a": }', "the body is not JSON: Expecting value: line 1 column 7 (char 6)"),
    ],
)
def test_what_is_no_body_is_told_in_a_line(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(raw)
    assert (refused.value.status, refused.value.message) == (400, said)


def test_a_models_name_is_told_again_in_a_line() -> None:
    told = unknown_model("a\nb" + "c" * 5_000_000, ["tiny"]).message
    assert told.startswith("The model `a bcc")
    assert told.endswith("cc…` does not exist; this server has `tiny`.")
    assert len(told) < 300


def thinker() -> ModelCard:
    """A model whose template leaves room to think where it is not told otherwise, as Qwen3's."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}"
        "{% if share is defined %}{{ 1 / share }}{{ depth[0].x }}{% endif %}"
        "{% if sorted is defined %}{{ sorted | dictsort }}{% endif %}"
    )
    return card_for(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (None, "a"),
        ({}, "a"),
        ({"enable_thinking": True}, "a"),
        ({"enable_thinking": False, "another": [1]}, "ano thoughts"),
    ],
)
def test_a_template_takes_arguments_of_its_own(arguments: dict[str, Any] | None, text: str) -> None:
    card = thinker()
    chat = read_body({"messages": [TURN], "chat_template_kwargs": arguments}, ChatBody)
    refuse_unsupported(chat)
    backend = tokenizer_backend(card)
    assert chat_prompt(chat, card, backend)[0] == encode(backend, text, False)
    responses = read_body({"input": "a", "chat_template_kwargs": arguments}, ResponsesBody)
    assert chat_prompt(responses.as_chat(), card, tokenizer_backend(card))[0] == encode(
        tokenizer_backend(card), text, False
    )


@pytest.mark.parametrize(
    ("effort", "arguments", "text"),
    [
        ("low", {}, "a, effort low"),
        ("none", {}, "ano thoughts, effort none"),
        ("none", {"enable_thinking": True}, "a, effort none"),
        ("high", {"enable_thinking": False, "reasoning_effort": "all"}, "ano thoughts, effort all"),
        (None, {}, "a"),
    ],
)
def test_a_template_is_told_how_much_to_think(effort: str | None, arguments: dict[str, Any], text: str) -> None:
    card = thinker()
    card.tokenizer.chat_template += "{% if reasoning_effort %}, effort {{ reasoning_effort }}{% endif %}"
    for kind in (ChatBody, TokenizeBody):
        fields = {"messages": [TURN], "reasoning_effort": effort, "chat_template_kwargs": arguments}
        assert render_chat(card, read_body(fields, kind)) == text
    fields = {"input": "a", "reasoning": {"effort": effort}, "chat_template_kwargs": arguments}
    responses = read_body(fields, ResponsesBody)
    assert render_chat(card, responses.as_chat()) == text
    assert json.loads(responses.repeated(card.sampling_defaults))["reasoning"]["effort"] == effort


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels - 1):
        made = [made]
    return made


def test_arguments_of_a_template_may_be_nested() -> None:
    arguments = {"a": nested(31), "b": {"c": [1, "two", None]}}
    chat = read_body({"messages": [TURN], "chat_template_kwargs": arguments}, ChatBody)
    assert chat.template_arguments == arguments


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"7" * 5000: "a"}},
        {"tidar": {"d" * 5000: 1}},
        {"tools": [{"type": "function", "function": {"name": "n" * 5000}}]},
        {"messages": [{"role": "user", "content": [{"type": "t" * 5000}]}]},
    ],
)
def test_of_what_is_wrong_no_more_is_told_again_than_a_reader_needs(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read_body({"messages": [TURN], **fields}, ChatBody)
    assert len(refused.value.param or "") <= 200
    assert len(refused.value.message) <= 500


@pytest.mark.parametrize(
    ("arguments", "param", "said"),
    [
        ({"messages": []}, "chat_template_kwargs", "`messages` is no argument"),
        ({"conversations": []}, "chat_template_kwargs", "`conversations` is no argument"),
        ({"self": 1}, "chat_template_kwargs", "`self` is no argument"),
        ({"tokenize": True}, "chat_template_kwargs", "`tokenize` is no argument"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs", "`chat_template` is no argument"),
        ({"share": 0}, "messages", "refused the messages: division by zero"),
        ({"share": 1, "depth": []}, "messages", "refused the messages"),
        ({"share": {}}, "messages", "refused the messages"),
        ({"sorted": []}, "messages", "'list' object has no attribute 'items'"),
        (dict.fromkeys(map(str, range(40))), "chat_template_kwargs", "32"),
        ("enable_thinking", "chat_template_kwargs", "must be an object"),
        ({"a": nested(32)}, "chat_template_kwargs", "at most 32 levels of lists and objects are taken"),
        ({"a": [nested(250)] * 1000}, "chat_template_kwargs", "at most 32 levels of lists and objects are taken"),
    ],
)
def test_arguments_that_a_template_cannot_take(arguments: Any, param: str, said: str) -> None:
    card, body = thinker(), {"messages": [TURN], "chat_template_kwargs": arguments}
    with pytest.raises(ApiError) as refused:
        chat_prompt(read_body(body, ChatBody), card, tokenizer_backend(card))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert said in refused.value.message
    assert "\n" not in refused.value.message


def test_a_message_of_the_assistant_is_gone_on_with() -> None:
    card = card_for(tiny_tokenizer())
    backend = tokenizer_backend(card)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The quick"}]
    asked, text = chat_prompt(chat(messages=messages, continue_final_message=True), card, backend)
    assert text == card.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe quick"
    assert backend.decode(list(asked), skip_special_tokens=False) == text
    as_clients = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert chat_prompt(as_clients, card, backend) == (asked, text)
    closed = chat_prompt(chat(messages=messages), card, backend)
    nothing = {"continue_final_message": None, "add_generation_prompt": None, "add_special_tokens": None}
    assert chat_prompt(chat(messages=messages, **nothing), card, backend) == closed
    null = chat(messages=messages, continue_final_message=True, add_generation_prompt=None)
    assert chat_prompt(null, card, backend) == (asked, text)
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for wrong in (
        {"messages": messages, "add_generation_prompt": True},
        {"messages": messages[:1]},
        {"messages": [messages[0], {"role": "assistant", "content": ""}]},
        {"messages": [messages[0], {"role": "assistant", "content": " \n\t\u2003"}]},
        {"messages": [messages[0], {"role": "assistant", "content": None, "refusal": "No."}]},
        {"messages": [messages[0], {**messages[1], "tool_calls": calls}]},
    ):
        body = {"messages": messages, "model": "tiny", "continue_final_message": True, **wrong}
        assert refused(read_body, body, ChatBody).param == "continue_final_message"
        assert refused(read_body, body, TokenizeBody).param == "continue_final_message"


def test_no_tool_calls_are_none_at_all() -> None:
    card = card_for(tiny_tokenizer())
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    empty = [{**turn, "tool_calls": []} for turn in turns]
    assert chat_prompt(chat(messages=empty), card, tokenizer_backend(card)) == chat_prompt(
        chat(messages=turns), card, tokenizer_backend(card)
    )


def test_a_message_that_the_template_changes_is_not_gone_on_with() -> None:
    """As templates do that cut thoughts out of messages. Of the chat the error repeats nothing."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content.split('</think>')[-1] | trim }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    card = card_for(tokenizer)

    def said(content: str, before: str = "secret\nplan") -> str:
        messages = [{"role": "user", "content": before}, {"role": "assistant", "content": content}]
        return render_chat(card, chat(messages=messages, continue_final_message=True))

    assert said(" Well, ") == "[secret\nplan][Well,"
    for before in ("secret\nplan", "<think>a</think>b", "b"):
        fault = refused(said, "<think>a</think>b", before)
        assert fault.param == "continue_final_message"
        assert "changes the last message" in fault.message
        assert "secret" not in fault.message
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}"
    assert "changes the last message" in refused(said, "well").message
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}: {{ m.content | upper }}]{% endfor %}"
    assert "changes the last message" in refused(said, "well").message
    tokenizer.chat_template = "{{ raise_exception('no\n' * 100000) }}"
    assert len(refused(said, "well").message) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": None, "add_special_tokens": None, "tool_choice": None, "tools": None},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"shout": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
        {"tool_choice": "required"},
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
    ],
)
def test_a_chat_is_tokenized_as_it_is_answered(fields: dict[str, Any]) -> None:
    tokenizer = tool_tokenizer(HERMES_TEMPLATE)
    tokenizer.chat_template += "{% if shout %}!{% endif %}"
    card = card_for(tokenizer)

    def rendered(kind: type[ChatBody] | type[TokenizeBody]) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]
        try:
            return render_chat(card, read_body({"messages": messages, **fields}, kind))
        except ApiError as error:
            return f"{error.param}: {error.message}"

    assert rendered(ChatBody) == rendered(TokenizeBody)


def test_who_speaks_is_told_the_template() -> None:
    """Hermes 2 Pro's refuses what a tool brought where it does not hear the tool's name; others want the call's."""
    tokenizer = tool_tokenizer(HERMES_TEMPLATE)
    told = "{{ m.name if m.name is defined else '-' }}{{ m.tool_call_id }}"
    tokenizer.chat_template += f"{{% for m in messages %}}{told}{{% endfor %}}"
    turns: list[Any] = [{**TURN, "name": "Ada"}, {**TURN, "name": None}]
    turns += [{"role": "tool", "tool_call_id": "#1", "name": "now", "content": "9:00"}]
    assert render_chat(card_for(tokenizer), chat(messages=turns)).endswith("Ada-now#1")


def test_what_a_chats_prompt_cannot_have_is_refused_by_tokenize_too() -> None:
    for name in ("chat_template", "documents", "functions"):
        body = {"messages": [{"role": "user", "content": "a"}], name: ["a"]}
        assert refused(read_body, body, TokenizeBody).param == name
        assert refused(refuse_unsupported, read_body(body, ChatBody)).param == name
        read_body({**body, name: None}, TokenizeBody)


def test_of_a_prompt_the_last_tokens_count_where_that_is_asked_for() -> None:
    card = card_for(tiny_tokenizer())
    backend = tokenizer_backend(card)
    text = "The quick brown fox jumps over the lazy dog."
    ids = encode(backend, text, True)

    def cut(**fields: Any) -> list[tuple[int, ...]]:
        return completion_prompts(completion(prompt=[text], **fields), card, backend)

    assert cut(truncate_prompt_tokens=5) == [ids[-5:]]
    assert cut(truncate_prompt_tokens=len(ids)) == cut(truncate_prompt_tokens=MANY) == cut() == [ids]
    assert completion_prompts(completion(prompt=[[1, 2], [3, 4, 5]], truncate_prompt_tokens=2), card, backend) == [
        (1, 2),
        (4, 5),
    ]
    whole, _ = chat_prompt(chat(), card, backend)
    assert chat_prompt(chat(truncate_prompt_tokens=3), card, backend)[0] == whole[-3:]
    for wrong in (0, -2, True):
        assert refused(read_body, {"prompt": "a", "truncate_prompt_tokens": wrong}, CompletionBody).status == 400


@pytest.mark.parametrize(("limit", "left"), [(None, 63), (0, 63), (24, 40), (64, 1), (99, 1)])
def test_a_prompt_may_be_cut_to_what_leaves_room_for_the_answer(limit: int | None, left: int) -> None:
    assert most_tokens(-1, card_for(tiny_tokenizer()), limit) == left


def test_what_stands_in_front_of_every_text_is_not_cut_off() -> None:
    """Many models answer badly without it."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    backend = tokenizer_backend(card_for(tokenizer))
    ids = encode(backend, "The quick brown fox", True)
    assert ids[0] == 0
    assert [encode_end(backend, "The quick brown fox", True, most) for most in (1, 2, 4, 99, None)] == [
        ids[-1:],
        (0, ids[-1]),
        (0, *ids[-3:]),
        ids,
        ids,
    ]
    assert encode_end(backend, "The quick brown fox", False, 2) == ids[-2:]
