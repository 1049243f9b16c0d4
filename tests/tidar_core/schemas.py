"""Random JSON schemas that a model can only follow for a while: everything in them has a bound."""

import random
from typing import Any

PATTERNS = ("[a-z]{2,6}", "(on|off)", "[A-Z][a-z]{0,5}", "[0-9]{3}-[0-9]{2}", "x(yz){1,3}", "")
WORDS = ("red", "green", "zwölf", "東京", 'a "quoted" word', "back\\slash", "", "🙂", "line\nend")


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema at most `depth` objects or arrays deep, an object at the top."""
    return _object(draw, depth)


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_integer, _string, _enum, _plain, _constant)
    if depth and draw.random() < 0.45:
        return draw.choice((_object, _array, _alternatives))(draw, depth)
    return draw.choice(leaves)(draw)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(("id", "name", "ok", "größe", "tags", "a b", 'q"q', "next"), draw.randint(0, 3))
    properties = {name: _any(draw, depth - 1) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = [name for name in names if draw.random() < 0.7]
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    fewest = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + draw.randint(0, 2),
    }


def _alternatives(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _integer(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 1000)}


def _string(draw: random.Random) -> dict[str, Any]:
    pattern = draw.choice(PATTERNS)
    if pattern:
        return {"type": "string", "pattern": f"^{pattern}$"}
    fewest = draw.randint(0, 3)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + draw.randint(0, 8)}


def _enum(draw: random.Random) -> dict[str, Any]:
    return {"enum": draw.sample((*WORDS, 1, 2.5, True, None), draw.randint(1, 4))}


def _plain(draw: random.Random) -> dict[str, Any]:
    return {"type": draw.choice(("boolean", "null", ["boolean", "null"]))}


def _constant(draw: random.Random) -> dict[str, Any]:
    return {"const": draw.choice((*WORDS, 7, False))}
