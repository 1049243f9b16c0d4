"""What a model thinks before it answers: told apart however the text is cut, in all of OpenAI's objects."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from cluster.errors import ApiError
from cluster.wire.answer import runs
from cluster.wire.messages import Message
from cluster.wire.responses_asked import ResponsesBody
from cluster.wire.thoughts import Thinking, Thought, ThoughtParser, behind_thoughts, thinking, thought_limit
from cluster.wire.tool_calls import HERMES, CallDelta, ToolParser
from tests.cluster.guarded import Guarded
from tests.cluster.wire.test_responses_told import EVENTS
from tests.tiny import THINKING_TEMPLATE, thinking_tokenizer, tiny_tokenizer, tool_tokenizer
from tidar_core.grammar.compiling import compile_grammar
from tidar_core.grammar.grammar import Grammar, schema_grammar, tag_grammar
from tidar_core.request import ThoughtLimit

PLAIN = Thinking("<think>", "</think>", 7, begun=False)
BEGUN = Thinking("<think>", "</think>", 7, begun=True)
AMID = Thinking("<think>", "</think>", 7, begun=True, amid=True)
CASES: list[tuple[Thinking, str, tuple[str, str]]] = [
    (PLAIN, "<think>\nWhy?\nSo.\n</think>\n\nYes.\n", ("Why?\nSo.", "Yes.\n")),
    (PLAIN, "\n <think>a</think>b", ("a", "b")),
    (PLAIN, "<think>\n\n</think>\n\nYes", ("", "Yes")),
    (PLAIN, "<think>never ends </thin", ("never ends </thin", "")),
    (PLAIN, "<think>a</think>", ("a", "")),
    (PLAIN, "<thin air", ("", "<thin air")),
    (PLAIN, " <thi", ("", " <thi")),
    (PLAIN, "\nNo thoughts, <think>a</think>.", ("", "\nNo thoughts, <think>a</think>.")),
    (PLAIN, "<think>a</think>b</think><think>c", ("a", "b</think><think>c")),
    (BEGUN, "Why?\n</think>\n\nYes", ("Why?", "Yes")),
    (BEGUN, "<think>\nWhy?</think>Yes", ("Why?", "Yes")),
    (BEGUN, "</think>\nYes", ("", "Yes")),
    (BEGUN, "cut", ("cut", "")),
    (BEGUN, "", ("", "")),
    (AMID, " so,\n\nthen. \n</think>\n\nYes", (" so,\n\nthen.", "Yes")),
    (AMID, "\n<think>", ("\n<think>", "")),
    (AMID, "\n</think>Yes", ("", "Yes")),
]


def split(parser: ThoughtParser, pieces: list[str]) -> tuple[str, str]:
    told = [part for piece in pieces for part in parser.push(piece)] + list(parser.finish())
    thoughts = "".join(part.text for part in told if isinstance(part, Thought))
    return thoughts, "".join(part for part in told if isinstance(part, str))


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[1]))
@given(data=st.data())
def test_thoughts_are_told_apart_however_the_text_is_cut(case: Any, data: st.DataObject) -> None:
    how, text, expected = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(how.parser(), pieces) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "</thi"]), max_size=10),
    st.sampled_from([PLAIN, BEGUN, AMID]),
)
def test_no_text_is_lost_but_tags_and_white_space(pieces: list[str], how: Thinking) -> None:
    thoughts, text = split(how.parser(), pieces)
    bare = "".join(pieces).replace("<think>", "").replace("</think>", "").split()
    assert "".join((thoughts + text).replace("<think>", "").replace("</think>", "").split()) == "".join(bare)


def test_what_is_thought_can_be_read_as_it_comes() -> None:
    parser = PLAIN.parser()
    assert parser.push("<think>One") == (Thought("One"),)
    assert parser.push(" two.") == (Thought(" two."),)
    assert parser.push(" </think> Yes") == ("Yes",)
    assert parser.over


def test_tokens_of_thoughts_are_counted() -> None:
    parser = PLAIN.parser()
    for text, tokens, so_far in (
        ("<think>", (6,), 1), ("a b", (3, 4), 3), ("c</think> d", (5, 7, 8), 5), ("e", (9,), 5),
    ):  # fmt: skip
        parser.push(text)
        parser.count(tokens)
        assert parser.tokens == so_far
    silent = PLAIN.parser()
    silent.push("no")
    silent.count((1, 2))
    assert silent.tokens == 0
    amid = AMID.parser()
    amid.push(" so</think>a")
    amid.count((4, 7, 8))
    assert amid.tokens == 2
    held = BEGUN.parser()  # a stop string may hold back text whose tokens are counted
    for text, tokens in (("", (3, 4)), ("ab", (7, 8)), ("</think>cd", (9,))):
        held.push(text)
        held.count(tokens)
    assert held.tokens == 3


def test_a_template_tells_who_thinks_aloud() -> None:
    tokenizer = thinking_tokenizer()
    turns = [{"role": "user", "content": "Well?"}]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert thinking(tokenizer, prompt) == Thinking("<think>", "</think>", end, begun=False)
    assert thinking(tokenizer, prompt + "<think>\n") == Thinking("<think>", "</think>", end, begun=True)
    none = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert thinking(tokenizer, str(none)) is None, "it has thought already"
    assert thinking(tool_tokenizer(), prompt) is None


@pytest.mark.parametrize(
    ("said", "begun", "amid"),
    [
        ("Well", False, False),
        ("<think>", True, False),
        ("\n<think>\n", True, False),
        ("<think>\nWhy ", True, True),
        ("<think>a <think>", True, True),
        ("<think>a</think>b", False, False),
        ("<think>a</think>b<think>", False, False),
        ("It begins with <think>, they say", False, False),
        ("a</think>b<think>c", False, False),
    ],
)
def test_an_answer_goes_on_in_the_midst_of_thoughts_it_began_with(said: str, begun: bool, amid: bool) -> None:
    tokenizer = thinking_tokenizer()
    turns = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": said}]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True))
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert thinking(tokenizer, prompt, said) == (Thinking("<think>", "</think>", end, True, amid) if begun else None)


@pytest.mark.parametrize(
    ("prompt", "said", "tokens", "limit"),
    [
        ("assistant\n", None, 9, ThoughtLimit("<think>", "</think>", False, 9)),
        ("assistant\n<think>\n", None, 0, ThoughtLimit("<think>", "</think>", True, 0)),
        ("assistant\n<think>\nWhy ", "<think>\nWhy ", 5, ThoughtLimit("<think>", "</think>", True, 5)),
        ("assistant\n", None, -1, None),
        ("<think>\n\n</think>\n\n", None, 5, None),
        ("assistant\nWell", "Well", 5, None),
    ],
)
def test_how_long_they_may_be(prompt: str, said: str | None, tokens: int, limit: ThoughtLimit | None) -> None:
    tokenizer = thinking_tokenizer()
    assert thought_limit(tokenizer, thinking(tokenizer, prompt, said), tokens) == limit


def test_what_cannot_be_limited_is_told() -> None:
    for tokenizer in (tiny_tokenizer(), special()):
        with pytest.raises(ApiError, match="no reasoning section the server can recognize"):
            thought_limit(tokenizer, None, 5)
        assert thought_limit(tokenizer, None, -1) is None, "asks for nothing"
    with pytest.raises(ApiError, match=r"-1 \(no limit\) or more"):
        thought_limit(thinking_tokenizer(), None, -2)


def special() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    return tokenizer


def test_tags_that_are_no_text_are_not_looked_for() -> None:
    tokenizer = special()
    tokenizer.chat_template = THINKING_TEMPLATE
    assert thinking(tokenizer, "") is None


def test_tags_of_several_tokens_are_read_as_text() -> None:
    """As Olmo 3's."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    how = thinking(tokenizer, "assistant\n")
    assert how == Thinking("<think>", "</think>", None, begun=False)
    parser = how.parser()
    counted = []
    for text, tokens in (("<thi", (1, 2)), ("nk>a</th", (3, 4, 5)), ("ink>b", (6, 7))):
        parser.push(text)
        parser.count(tokens)
        counted.append(parser.tokens)
    assert counted == [0, 5, 7]


def test_thoughts_come_before_calls() -> None:
    parser, tools = PLAIN.parser(), ToolParser(HERMES, {"weather": {}}, True, lambda: "call")
    text = '<think>\nI call.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    told: list[Any] = []
    for part in (*parser.push(text), *parser.finish()):
        told += [part] if isinstance(part, Thought) else tools.push(part)
    thought, call = runs([*told, *tools.finish()])
    assert thought == Thought("I call.")
    assert isinstance(call, CallDelta)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})


def test_thoughts_of_an_earlier_turn_are_the_templates() -> None:
    earlier = {"role": "assistant", "content": "Yes.", "reasoning_content": "Why?"}
    assert Message.model_validate(earlier).for_template() == earlier
    for more in ({"reasoning": "Why?"}, {"reasoning": "Why?", "reasoning_content": None}):
        newer = {"role": "assistant", "content": "Yes.", **more}
        assert Message.model_validate(newer).for_template() == earlier, "as vLLM tells it"
    assert not Message.model_validate({"role": "assistant", "content": "Yes.", "reasoning": {"effort": 1}}).thought
    cut = Message.model_validate({"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Why"})
    assert cut.for_template() == {"role": "assistant", "content": "", "reasoning_content": "Why"}
    items: list[Any] = [
        {"role": "user", "content": "Well?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Why?"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "9:00"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "It is nine."},
    ]
    asked = ResponsesBody.model_validate({"input": items}).as_chat()
    told = [message.for_template().get("reasoning_content") for message in asked.messages]
    assert told == [None, "Why?", None, None]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]}
    others: list[Any] = [
        {"role": "user", "content": "Well?"}, thought,
        {"role": "user", "content": "Well?"}, {"type": "reasoning", "content": "text"}, thought, thought,
        {"role": "assistant", "content": "It is."}, thought,
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    ]  # fmt: skip
    asked = ResponsesBody.model_validate({"input": others}).as_chat()
    assert [message.thought for message in asked.messages] == ["", "", "cutcutcut"]


@pytest.mark.parametrize(
    "inner",
    [
        Grammar("regex", "[A-Z]{4}"),
        Grammar("ebnf", 'root ::= "ABCD"'),
        tag_grammar({"type": "const_string", "value": "ABCD"}),
    ],
    ids=lambda grammar: grammar.kind,
)
@pytest.mark.parametrize("how", [PLAIN, BEGUN], ids=["plain", "begun"])
def test_what_an_answer_follows_it_follows_behind_thoughts(how: Thinking, inner: Grammar) -> None:
    tokens = xgrammar.TokenizerInfo.from_huggingface(thinking_tokenizer(), vocab_size=512, stop_token_ids=[2])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    grammar = behind_thoughts(inner, how, "response_format")
    compiled = compile_grammar(compiler, grammar.kind, grammar.text)

    def follows(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(text) and matcher.accept_token(2)

    begin = "" if how.begun else "<think>"
    assert follows(f"{begin}\nAny <text> {{}}\n</think>\n\nABCD")
    assert follows(f"{begin}</think>ABCD")
    assert follows("ABCD") is not how.begun
    assert not follows(f"{begin}ABCD")
    assert not follows(f"{begin}a</think>b</think>ABCD")
    assert not follows(f"{begin}a</think>")
    assert grammar.parts == (("response_format", inner),), "by which its mistakes are told"


def test_a_schema_behind_thoughts_is_still_checked() -> None:
    with pytest.raises(ApiError, match="response_format: a grammar may have at most 65536 bytes"):
        behind_thoughts(Grammar("regex", "a" * 65_500), PLAIN, "response_format")
    schema = schema_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}})
    behind = behind_thoughts(schema, PLAIN, "response_format")
    assert behind.kind == "structural_tag"
    assert json.loads(behind.text)["format"]["elements"][-1]["json_schema"] == json.loads(schema.text)
    assert behind_thoughts(Grammar("json_object"), PLAIN, "response_format").kind == "structural_tag"


# From here on: the openai package against a real server. A random model does not think of itself: bias has it begin and
# say one letter until it has said that too often. What follows is the grammar's.


@pytest.fixture(scope="module")
def client(guarded: Guarded) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=guarded.key, max_retries=0, timeout=120) as made:
        yield made


def forced(**extra: Any) -> dict[str, Any]:
    tokenizer = thinking_tokenizer(400)
    (letter,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    return {
        "temperature": 0,
        "extra_body": {
            "structured_outputs": {"regex": "[A-Z]{4,9}"},
            "logit_bias": {str(begin): 60, str(letter): 90, str(end): 81},
            "frequency_penalty": 2,
            **extra,
        },
    }


def chat(guarded: Guarded, **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Well?"}]
    return {"model": guarded.beside, "messages": messages, "max_tokens": 60, **forced(**extra)}


def test_a_chat_tells_thoughts_whole_and_streamed(client: openai.OpenAI, guarded: Guarded) -> None:
    answers: list[Any] = [
        client.chat.completions.create(**chat(guarded, tidar={"drafts": drafts})) for drafts in ("off", "full")
    ]
    first, second = (answer.choices[0].message for answer in answers)
    assert (first.content, first.reasoning_content) == (second.content, second.reasoning_content)
    assert re.fullmatch("[A-Z]{4,9}", first.content)
    assert re.fullmatch("a{3,6}", first.reasoning_content)
    assert first.reasoning == first.reasoning_content
    usage = answers[0].usage
    assert usage.completion_tokens_details.reasoning_tokens == len(first.reasoning_content) + 2
    with client.chat.completions.create(**chat(guarded), stream=True) as stream:
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == first.content
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == first.reasoning_content


def test_who_does_not_want_to_hear_them_hears_the_answer_alone(client: openai.OpenAI, guarded: Guarded) -> None:
    asked = chat(guarded, include_reasoning=False)
    whole: Any = client.chat.completions.create(**asked)
    said: Any = client.chat.completions.create(**chat(guarded))
    message = whole.choices[0].message
    assert message.content == said.choices[0].message.content
    assert not hasattr(message, "reasoning")
    assert whole.usage.completion_tokens == said.usage.completion_tokens
    with client.chat.completions.create(**asked, stream=True) as stream:
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert not any(hasattr(delta, "reasoning") for delta in deltas)


@pytest.mark.parametrize("drafts", ["off", "full"])
def test_thoughts_may_be_limited(client: openai.OpenAI, guarded: Guarded, drafts: str) -> None:
    """Those that would be longer end there, and the answer follows; others are as they were."""
    draft = {"drafts": drafts}
    free: Any = client.chat.completions.create(**chat(guarded, tidar=draft)).choices[0].message
    for budget in (0, 1, 2, len(free.reasoning_content), 40, -1):
        asked = chat(guarded, tidar=draft, thinking_token_budget=budget)
        answer: Any = client.chat.completions.create(**asked)
        message, usage = answer.choices[0].message, answer.usage
        most = len(free.reasoning_content) if budget < 0 else min(budget, len(free.reasoning_content))
        assert getattr(message, "reasoning_content", "") == most * "a"
        assert usage.completion_tokens_details.reasoning_tokens == most + 2
        assert re.fullmatch("[A-Z]{4,9}", message.content)
        assert most < len(free.reasoning_content) or message.content == free.content
        with client.chat.completions.create(**asked, stream=True) as stream:
            deltas: list[Any] = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == message.content
    shown: Any = client.chat.completions.create(**chat(guarded, tidar=draft | {"trace": True}, thinking_token_budget=2))
    assert re.fullmatch(r"<think>aa</think>\s*[A-Z]{4,9}", shown.choices[0].message.content)


def test_limits_of_thoughts_beyond_reason_are_told(client: openai.OpenAI, guarded: Guarded) -> None:
    for model, budget, said in (
        (guarded.beside, -2, r"must be -1 \(no limit\) or more"),
        (guarded.beside, 1.5, "valid integer"),
        ("tiny", 5, "no reasoning section the server can recognize"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            client.chat.completions.create(**chat(guarded, thinking_token_budget=budget) | {"model": model})
        assert refused.value.param == "thinking_token_budget"


def test_a_trace_shows_the_text_as_the_model_says_it(client: openai.OpenAI, guarded: Guarded) -> None:
    told: Any = client.chat.completions.create(**chat(guarded, tidar={"trace": True})).choices[0].message
    assert re.fullmatch(r"<think>a+</think>\s*[A-Z]{4,9}", told.content)
    assert not hasattr(told, "reasoning_content")
    assert not hasattr(told, "reasoning")


def test_a_response_has_an_item_for_them(guarded: Guarded, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": guarded.beside, "input": "Well?", "max_output_tokens": 60, **forced()}
    whole: Any = client.responses.create(**fields)
    thought, message = whole.output
    assert (thought.type, thought.status, message.type) == ("reasoning", "completed", "message")
    assert re.fullmatch("a{3,6}", thought.content[0].text)
    assert re.fullmatch("[A-Z]{4,9}", message.content[0].text)
    assert whole.usage.output_tokens_details.reasoning_tokens == len(thought.content[0].text) + 2
    with client.responses.create(**fields, stream=True) as stream:
        events: list[Any] = list(stream)
    for event in events:
        EVENTS[event.type].model_validate(event.model_dump(exclude_unset=True, by_alias=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    limited: Any = client.responses.create(**fields | {"extra_body": forced(thinking_token_budget=2)["extra_body"]})
    assert limited.output[0].content[0].text == "aa"
    sent_back = [{"role": "user", "content": "Well?"}, *whole.model_dump(exclude_unset=True)["output"]]
    again: Any = client.responses.create(**fields | {"input": [*sent_back, {"role": "user", "content": "And?"}]})
    assert again.status == "completed"


def test_who_is_not_to_think_answers_at_once(client: openai.OpenAI, guarded: Guarded) -> None:
    asked = chat(guarded, chat_template_kwargs={"enable_thinking": False})
    told: Any = client.chat.completions.create(**asked).choices[0].message
    assert re.fullmatch("[A-Z]{4,9}", told.content)
    assert not hasattr(told, "reasoning_content")
    assert not hasattr(told, "reasoning")
