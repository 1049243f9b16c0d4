"""Of which types the values are that a schema allows."""

from typing import Any

import pytest

from cluster.wire.schema_types import TYPES, led_to, values_of

LONG_CHAIN = {str(place): {"anyOf": [{"$ref": f"#/$defs/{place + 1}"}]} for place in range(5000)}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "maxLength": 3}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, {"enum": [1, 2.5]}]}]},
         {"string", "null", "integer", "number"}),
        ({"const": True}, {"boolean"}),
        ({"enum": [[], {}, "a"], "type": "string"}, {"array", "object", "string"}),
        ({"properties": {}}, {"object"}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "array"}}}, {"array"}),
        ({"$ref": "#/$defs/0", "$defs": LONG_CHAIN | {"5000": {"type": "null"}}}, {"null"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, set()),
        (False, set()),
        (True, TYPES),
        ({}, TYPES),
        ({"minimum": 3}, TYPES),
        ({"$ref": "#/nowhere"}, TYPES),
        ({"$ref": "https://example.org/schema"}, TYPES),
        ({"type": {"a": 1}}, TYPES),
        ({"type": ["unknown"]}, TYPES),
        ({"enum": "a"}, TYPES),
        ("no schema", TYPES),
    ],
)  # fmt: skip
def test_the_types_are_those_of_all_that_may_be(schema: Any, types: set[str]) -> None:
    assert values_of(schema, schema).types == types


def test_texts_are_listed_where_all_of_them_are() -> None:
    listed = {"anyOf": [{"enum": ["a", 1]}, {"const": "b"}, {"type": "integer"}]}
    assert values_of(listed, listed).texts == {"a", "b"}
    assert values_of({"type": ["integer", "null"]}, {}).texts == set()
    for free in ({"type": "string"}, {}, True, {"enum": "a"}):
        assert values_of({"anyOf": [{"const": "b"}, free]}, {}).texts is None


def test_references_into_lists_are_followed_in_no_more_time_than_others() -> None:
    """Nobody has checked the schema of a function that is not strict, which is read where streams wait."""

    class Listed(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all of the list is read")

    whole = {"anyOf": Listed([{"type": "string"}, {"type": "null"}])}
    assert led_to("#/anyOf/1", whole) == {"type": "null"}
    for beyond in ("2", "10", "9" * 5000, "-1", "x", ""):
        assert led_to(f"#/anyOf/{beyond}", whole) is None
    assert led_to("elsewhere/anyOf/1", whole) is None
