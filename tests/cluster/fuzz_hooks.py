"""What schemathesis loads: requests that get past the first check, and answers that do not take long."""

import json
import random
from typing import Any

import schemathesis

NEEDED = frozenset({"messages", "prompt", "tokens", "tools", "tool_choice"})
OTHERS = 4  # fields; with all thirty at once, one is always wrong
MOST_TOKENS = 32
MOST_CHOICES = 2


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    chance = random.Random(json.dumps(body, default=str, sort_keys=True))
    others = [name for name in body if name not in NEEDED]
    kept = {*NEEDED, *chance.sample(others, min(OTHERS, len(others)))}
    body = {name: value for name, value in body.items() if name in kept}
    if isinstance(body.get("model"), str):
        body["model"] = chance.choice(["tiny", "tiny", "tiny", body["model"]])
    wanted = body.get("max_tokens")
    if ("messages" in body and wanted is None) or (isinstance(wanted, int) and wanted > MOST_TOKENS):
        body["max_tokens"] = chance.choice([1, MOST_TOKENS])
    if isinstance(body.get("n"), int) and body["n"] > MOST_CHOICES:
        body["n"] = chance.choice([MOST_CHOICES, body["n"]])
    return body
