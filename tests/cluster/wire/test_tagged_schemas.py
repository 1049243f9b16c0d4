"""What calls in tags are held to: whatever they may be, what is read of them is valid."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ApiError
from cluster.wire.tagged_arguments import LONGEST_KEY
from cluster.wire.tagged_schemas import FORMATS, arguments_format
from cluster.wire.tool_calls import QWEN_CODER, CallDelta
from cluster.wire.tools import Function, calls
from tests.cluster.wire.test_tagged_arguments import TEXTS, written
from tests.cluster.wire.test_tool_calls import parsed
from tests.cluster.wire.test_tools import WEATHER, boxed, tool
from tests.tidar_core.engines import tiny_engine
from tests.tiny import QWEN_CODER_TEMPLATE, tool_tokenizer
from tidar_core.bench.drive import answer_all
from tidar_core.grammar.compiling import compile_grammar
from tidar_core.grammar.grammar import schema_grammar, tag_grammar
from tidar_core.grammar.schemas import GrammarError
from tidar_core.request import FinishReason, SamplingParams

COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([bytes([value]) for value in range(256)]), max_threads=1, cache_enabled=False
)
TAGS = [
    "\n</parameter>\n", "</parameter>", "\n<parameter=a>\n", "<parameter=", "</function>", "\n</tool_call>",
    "</parameter><parameter=b>", "</parameter></function>", "<tool_call>\n", "</parameter></tool_call>",
]  # fmt: skip
ENDS = ["</function>\n</tool_call>", "\n</parameter>\n", "$\n</parameter>\n", '"', "}", "]"]
PIECES = [
    *TAGS,
    *ENDS,
    "\u00a0",
    *'\n <>/="\\{}[],:.-+@ aBz019TZ_é🙂',
    "null",
    "true",
    "None",
    "12",
    "\\n",
    "\\u00e9",
    "auto",
]


def held(parameters: Any, parallel: bool = False) -> xgrammar.CompiledGrammar:
    function = Function(name="add", parameters=parameters)
    grammar = tag_grammar(calls(QWEN_CODER, [function], parallel))
    return compile_grammar(COMPILER, grammar.kind, grammar.text)


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and matcher.is_completed()


def some_call(grammar: xgrammar.CompiledGrammar, rng: random.Random) -> str | None:
    """A call that the grammar takes: anything that is possible comes next, later on rather what ends something."""
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    text = ""
    for place in range(200):
        if matcher.is_completed():
            return text
        forced = matcher.find_jump_forward_string()
        pieces = rng.sample(PIECES, len(PIECES))
        ends = rng.sample(ENDS, len(ENDS)) if rng.random() < place / 50 else []
        bytes_left = [chr(code) for code in range(0x20, 0x7F)]
        every = [forced] * bool(forced) + ends + pieces + rng.sample(bytes_left, len(bytes_left))
        piece = next((one for one in every if matcher.fork().accept_string(one)), None)
        if piece is None:
            return None
        matcher.accept_string(piece)
        text += piece
    return None


PLAIN = {"type": "string"}
VALUES: list[Any] = [
    PLAIN,
    {},
    {"description": "anything"},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "number"},
    {"type": ["boolean", "null"]},
    {"type": ["string", "null"]},
    {"anyOf": [PLAIN, {"type": "null"}]},
    {"anyOf": [PLAIN, {"type": "integer"}, {"type": "array", "items": PLAIN}]},
    {"anyOf": [{"enum": [" [1]", "a"]}, PLAIN, {"type": "array", "items": PLAIN}]},
    {"type": ["array", "boolean", "integer", "null", "number", "object", "string"]},
    {"$ref": "#/$defs/tree/properties/next/anyOf/1"},
    {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"type": "object", "additionalProperties": False}]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"type": "boolean"}}]},
    {"enum": ["auto", "null", "1", "a\nb", "", "12", "x\n</parameter>\n"]},
    {"enum": ["auto", 12, None, [1], {"a": "é"}]},
    {"anyOf": [{"const": "auto"}, {"type": "integer"}]},
    {"anyOf": [{"enum": ["auto", "[1]", 3]}, {"type": "array", "items": {"type": "integer"}}, PLAIN]},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-z\\n<>]{1,3}.?$"},
    {"type": "string", "pattern": "^(a|b\\.)[^a]\\S*\\$$"},
    {"type": "string", "pattern": "^\\d{2}\\s?$|^z$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "our-own"},
    {"type": "array", "items": PLAIN, "maxItems": 2},
    {"type": "object", "properties": {"a": PLAIN, "b": {"$ref": "#/$defs/tree"}}, "required": ["a"]},
    {"$ref": "#/$defs/tree"},
    {"$ref": "#/$defs/size"},
    {"allOf": [{"$ref": "#/$defs/size"}]},
]
DEFS = {
    "size": {"enum": ["small", "large"]},
    "tree": {
        "type": "object",
        "properties": {"name": PLAIN, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
NAMES = ["a", "b", "city", 'no "plain" nàme', "<b", "type"]


# A schema for all parameters may stand behind something.
WRAPS = (
    lambda schema: {"$ref": "#/$defs/all", "$defs": {**DEFS, "all": schema}},
    lambda schema: {"allOf": [schema], "$defs": DEFS},
    lambda schema: {"anyOf": [{"$ref": "#/$defs/all"}], "$defs": {**DEFS, "all": schema}},
)


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    other = draw(st.sampled_from([{}, {"additionalProperties": False}]))
    found = {"type": "object", "properties": properties, "required": required, **other}
    if not properties:
        found |= draw(
            st.sampled_from([{}, {"unevaluatedProperties": PLAIN}, {"additionalProperties": {"type": "number"}}])
        )
    if draw(st.booleans()):
        return {"$defs": DEFS, **found}
    return draw(st.sampled_from(WRAPS))(found)


def check_read(text: str, schema: Any) -> None:
    said, found, complete, _ = parsed([text], QWEN_CODER, functions={"add": schema}, constrained=True)
    assert (said, complete, len(found)) == ("", True, 1), text
    jsonschema.validate(json.loads(found[0][2]), schema)


@given(schema=objects(), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_a_call_may_be_its_arguments_are_valid(schema: dict[str, Any], seed: int) -> None:
    grammar = held(schema)
    texts = [some_call(grammar, random.Random(seed + more)) for more in range(4)]
    for text in texts:
        if text is not None:
            check_read(text, schema)


@pytest.mark.parametrize("value", VALUES, ids=json.dumps)
def test_each_kind_of_value_can_be_written(value: Any) -> None:
    """As the walks above must come to an end for it."""
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "$defs": DEFS}
    grammar = held(schema)
    rng = random.Random(1)
    texts = [text for _ in range(40) if (text := some_call(grammar, rng)) is not None]
    assert len(texts) >= 10
    for text in texts:
        check_read(text, schema)


TEMPLATED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": PLAIN,
        "count": {"type": "integer"},
        "maybe": {"type": ["string", "null"]},
        "list": {"type": "array", "items": PLAIN},
        "day": {"type": "string", "format": "date"},
        "short": {"type": "string", "maxLength": 3},
    },
    "required": ["text"],
}
TOKENIZER = tool_tokenizer(QWEN_CODER_TEMPLATE)
TEMPLATED = held(TEMPLATED_SCHEMA)


@given(
    arguments=st.fixed_dictionaries(
        {"text": TEXTS},
        optional={
            "count": st.integers(-(10**6), 10**6),
            "maybe": st.none() | st.text(alphabet="ab<\n", max_size=9),
            "list": st.lists(st.text(alphabet='ab<>/"\\\né'), max_size=3),
            "day": st.dates().map(str),
            "short": st.text(alphabet="ab</é\t ", max_size=3),
        },
    )
)
@settings(max_examples=100, deadline=None)
def test_a_call_as_the_template_writes_it_may_come(arguments: dict[str, Any]) -> None:
    properties = TEMPLATED_SCHEMA["properties"]
    text = written("add", {name: arguments[name] for name in properties if name in arguments})
    assert takes(TEMPLATED, text)
    check_read(text, TEMPLATED_SCHEMA)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_texts_of_a_format_are_those_that_json_would_have(form: str, data: st.DataObject) -> None:
    expression = re.compile(FORMATS[form], re.ASCII)
    text = data.draw(st.from_regex(expression, fullmatch=True))
    grammar = schema_grammar({"type": "string", "format": form})
    assert takes(compile_grammar(COMPILER, grammar.kind, grammar.text), json.dumps(text))


def test_parameters_that_the_schema_does_not_name() -> None:
    schema = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}, "minProperties": 1}
    grammar = held(schema)
    assert takes(grammar, written("add", {"any name": "1", "b": "a\nb"}))
    assert not takes(grammar, written("add", {}))
    assert not takes(grammar, written("add", {"a": [1]}).replace("[1]", "x\n</parameter>"))
    check_read(written("add", {"a": "1"}), schema)
    assert takes(held({"type": "object", "additionalProperties": True}), written("add", {"a": "1", "b": [1]}))
    two = held({**schema, "maxProperties": 2})
    assert [takes(two, written("add", {str(name): "" for name in range(count)})) for count in range(4)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"a": {"minimum": 3}}, "parameter 'a': values of all types"),
        ({"a": {"$ref": "#/$defs/b"}}, "parameter 'a': a `$ref` leads to nothing"),
        ({"a": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/b/"}]}, "b": {}}, "a `$ref` leads to nothing"),
        ({"a": {"type": "string", "pattern": "a)|(b"}}, "`pattern` is no regular expression"),
        ({"a": {"type": "string", "pattern": "ab\\"}}, "`pattern` is no regular expression"),
        ({"a": {"type": "string", "format": "ipv6"}}, "`format` ipv6 cannot be enforced in this model's tags"),
        ({"a": {"type": "string", "pattern": "^a\\nb$"}}, "asks for '\\n', which cannot be written there: leave it"),
        ({"a": {"type": "string", "pattern": "^[\\n]$"}}, "a class of characters alone that cannot be written"),
        ({"a": {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "array"}]}}, "may be a list or an object"),
        ({"a": {"enum": ["a\n</parameter>"]}}, "none of its values can be written"),
        ({"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {}}, "`$ref` #/properties/b cannot be"),
        ({"a>b": PLAIN}, "parameter 'a>b': such a name cannot be written in this model's tags"),
        ({"a" * (LONGEST_KEY + 1): PLAIN}, "such a name cannot be written"),
    ],
    ids=str,
)  # fmt: skip
def test_a_parameter_that_cannot_be_kept_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(GrammarError) as caught:
        arguments_format({"type": "object", "properties": schema})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": [{"type": "object"}, {"type": "object", "properties": {}}]}, "alternatives for all parameters"),
        ({"type": "object", "enum": [{"a": 1}]}, "`const` and `enum` for all parameters"),
        ({"patternProperties": {"^a": {}}}, "`patternProperties` for all parameters"),
        ({"additionalProperties": True, "propertyNames": {"pattern": "^a"}}, "`propertyNames` for all"),
        ({"properties": {"a": {}}, "minProperties": 1}, "`minProperties` for all"),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "a"], "minProperties": 2}, "`minProperties` for all"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "`maxProperties` for all"),
        ({"properties": {"a": False}, "required": ["a"]}, "parameter 'a': none of its values can be written"),
        (
            {"properties": {"a": {"anyOf": [False]}}, "required": ["a"]},
            "parameter 'a': none of its values can be written",
        ),
    ],
)
def test_what_cannot_be_kept_of_all_parameters_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        arguments_format(schema)


def test_a_small_schema_that_says_much_is_refused_before_it_is_all_there() -> None:
    parameters = {f"p{place}": {"$ref": "#/$defs/many"} for place in range(600)}
    many = {"enum": [f"value {place}" for place in range(1000)]}
    with pytest.raises(GrammarError, match="too many or too large"):
        arguments_format({"type": "object", "properties": parameters, "$defs": {"many": many}})


def test_only_those_definitions_stand_beside_a_value_that_it_leads_into() -> None:
    unused = {f"d{place}": {"enum": ["a" * 1000]} for place in range(50)}
    defs = {"a/b": {"type": "array", "items": {"$ref": "#/$defs/c"}}, "c": {"type": "integer"}, **unused}
    lists = {f"p{place}": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}} for place in range(20)}
    written_down = json.dumps(arguments_format({"type": "object", "properties": lists, "$defs": defs}))
    assert "aaa" not in written_down
    assert takes(held({"type": "object", "properties": lists, "$defs": defs}), written("add", {"p3": [[1], []]}))


# From here on: requests, and answers of a model.

CALLS = (written("weather", {"city": "Köln", "days": 2}), written("now", {}))


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"tool_choice": "required"}, ["\n".join(CALLS)], ["", "Well.", written("now", {"a": 1})]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, CALLS[1:], [CALLS[0], "\n".join(CALLS)]),
        (
            {"tools": [tool("weather", WEATHER), tool("now", strict=True)]},
            ["", "Well.", f"Well. {CALLS[1]}", written("weather", {"city": 1, "other": ["<a>"]})],
            ["Well. " + written("now", {"a": 1})],
        ),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', *CALLS], ["Well.", '{"a": 1}' + CALLS[1]]),
    ],
    ids=["required", "named", "strict", "format"],
)
def test_what_a_request_holds_its_answer_to(fields: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    box = boxed(TOKENIZER, **fields)
    assert box is not None
    assert box.grammar is not None
    grammar = compile_grammar(COMPILER, box.grammar.kind, box.grammar.text)
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


def test_a_schema_that_cannot_be_kept_is_refused_only_where_it_must_be() -> None:
    tools = [tool("a", {"type": "object", "properties": {"b": {"type": "string", "format": "ipv6"}}})]
    free = boxed(TOKENIZER, tools=tools)
    assert free is not None
    assert free.grammar is None
    with pytest.raises(ApiError, match="tools: parameter 'b': `format` ipv6 cannot be enforced") as caught:
        boxed(TOKENIZER, tools=tools, tool_choice="required")
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_an_answer_that_is_held_to_calls_does_not_go_on_within_one() -> None:
    box = boxed(TOKENIZER, tool_choice="required")
    assert box is not None
    assert box.behind(f"Well. {CALLS[1]}").begun == ""
    with pytest.raises(ApiError, match="ends within a tool call"):
        box.behind(CALLS[0][:40])


def test_what_an_asked_format_has_in_its_texts_is_no_call() -> None:
    box = boxed(TOKENIZER, response_format={"type": "json_object"})
    assert box is not None
    text = json.dumps({"x": CALLS[1].replace("\n", "")})
    for pieces in ([text], list(text)):
        parser = box.parser()
        told = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
        assert "".join(map(str, told)) == text
    parser = box.parser()
    assert next(part for part in parser.push("\n" + CALLS[1]) if isinstance(part, CallDelta)).name == "now"


def test_a_models_calls_fit_with_drafts_and_without(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, threads=1)
    box = boxed(TOKENIZER, tool_choice="required")
    assert box is not None
    params = [
        SamplingParams(grammar=box.grammar, max_tokens=400, temperature=1.0, top_k=50, seed=seed, drafts=mode)
        for mode in ("off", "full")
        for seed in range(6)
    ]
    answers = answer_all(engine, [(5, 6, 7)] * len(params), params)
    texts = [engine.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    assert texts[:6] == texts[6:], "drafts change no call"
    ended = [text for text, answer in zip(texts, answers, strict=True) if answer.finish.reason is FinishReason.STOP]
    assert len(ended) >= 6
    for text in ended:
        said, found, complete, _ = parsed([text], QWEN_CODER, functions=box.functions, constrained=True)
        assert (said, complete) == ("", True)
        assert found
        for _, name, arguments in found:
            jsonschema.validate(json.loads(arguments), box.functions[name])
