"""Answers of every kind over replicas that are killed, ended or stopped under them.

Completions, chats and responses, whole and streamed, with tools, schemas, grammars, thoughts, stops, penalties,
log-probabilities and several choices.

Each is compared, all but its names and times, with what the same server says while nobody is hit.
For example: python -m tests.cluster.kinds_run --seconds 120 --blow kill
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken

from cluster.options import ServeOptions
from tests.cluster.kill_run import BLOWS
from tests.cluster.kills import Struck, slow_model, strike, wait_for_replicas
from tests.servers import Server, running, start_with
from tests.tiny import HERMES_TEMPLATE, tiny_adapter, tool_tokenizer

Json = dict[str, Any]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OPENINGS = ("The quick", "In the beginning", "She sells", "What is", "It costs", "東京は", "Zwölf", "🙂 Yes")
THOUGHTS = ("<think>", "</think>")
# What the model may do before it answers, in the template as in Qwen3's.
TEMPLATE = HERMES_TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LIST = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 12, "maxItems": 40}
SCHEMA = {"type": "object", "properties": {"words": LIST}, "required": ["words"], "additionalProperties": False}
LOOK = {"type": "object", "properties": {"what": {"type": "string", "minLength": 80, "maxLength": 160}, "list": LIST}}
ADD = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"enum": ["x", "yy"]}}}
FUNCTIONS: list[Json] = [
    {"name": name, "parameters": {**of, "required": list(of["properties"]), "additionalProperties": False}}
    for name, of in (("look", LOOK), ("add", ADD))
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}
GRAMMARS: tuple[Json, ...] = (
    {"regex": "[a-z ]{40,300}"},
    {"json": SCHEMA},
    {"choice": ["alpha beta gamma delta", "alpha beta gamma omega", "zeta"]},
    {"grammar": 'root ::= ("a" | "b" | group)+\ngroup ::= "(" [0-9]{1,5} ")"'},
)
# Other names and times are no other answer, nor is what another replica had cached.
OWN = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "metrics", "cached_tokens"}


@dataclass(frozen=True)
class Ask:
    path: str
    body: Json


def model_of_all(directory: Path) -> tuple[Path, Path, dict[str, int]]:
    """A model that may call tools and think, its drafter, and the ids of its tags."""
    model, _ = slow_model(directory)
    tokenizer = tool_tokenizer(TEMPLATE, vocab=510)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in THOUGHTS])
    tokenizer.save_pretrained(model)
    return (
        model,
        tiny_adapter(directory / "adapter", model),  # of this tokenizer
        {tag: tokenizer.convert_tokens_to_ids(tag) for tag in (*THOUGHTS, "<tool_call>")},
    )


def draw_ask(number: int, tags: dict[str, int]) -> Ask:
    """A request that the same number always gives."""
    draw = random.Random(number)
    path = draw.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, RESPONSES))
    body: Json = {"temperature": draw.choice((0, 0.7, 1.0, 1.4)), "stream": draw.random() < 0.75}
    if draw.random() < 0.4:
        body["top_p"] = 0.9
    body |= some_of(
        draw, 0.15, {"top_k": draw.choice((2, 40)), "min_p": 0.02, "presence_penalty": 0.5, "cache_salt": "a"}
    )
    tokens = draw.choice((60, 200, 400))
    if path == RESPONSES:
        return Ask(path, body | of_responses(draw, tokens))
    body |= of_both(draw, tokens)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    else:
        body |= some_of(draw, 0.2, {"prompt_logprobs": 2})
    body |= of_chats(draw, tags) if path == CHAT else of_completions(draw)
    if "allowed_token_ids" in body:
        body.pop("bad_words", None)  # one of both is all that goes
    return Ask(path, body)


def of_both(draw: random.Random, tokens: int) -> Json:
    some: Json = {
        "min_tokens": tokens // 2,
        "n": draw.choice((2, 3)),
        "stop": draw.sample([" the", "ab", "a ", "\n", "s", "he"], draw.choice((1, 2))),
        "include_stop_str_in_output": True,
        "return_token_ids": True,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "bad_words": draw.sample(["the", "a", "he", "\n", "an", " and", "in"], 3),
        "logit_bias": {str(draw.randrange(3, 500)): draw.choice((-100, 5, 10)) for _ in range(3)},
    }
    tidar = {"drafts": draw.choice(("off", "auto", "full"))} | some_of(draw, 0.2, {"block": draw.choice((1, 2, 3))})
    always = {"max_tokens": tokens, "seed": draw.randrange(2**31), "tidar": tidar}
    return always | some_of(draw, 0.3, some) | some_of(draw, 0.1, {"truncate_prompt_tokens": draw.choice((-1, 1, 20))})


def some_of(draw: random.Random, share: float, fields: Json) -> Json:
    """Each of the fields with this probability."""
    return {name: value for name, value in fields.items() if draw.random() < share}


def of_completions(draw: random.Random) -> Json:
    ids = [draw.randrange(3, 500) for _ in range(draw.randint(1, 60))]
    body: Json = {"prompt": draw.choice((ids, ids, draw.choice(OPENINGS), [ids, ids[:3]]))}
    if draw.random() < 0.4:
        body["logprobs"] = draw.choice((0, 2, 5))
    if draw.random() < 0.2:
        body["echo"] = True
    if draw.random() < 0.35:
        return body | {"structured_outputs": draw.choice(GRAMMARS)}
    if draw.random() < 0.2:
        body |= {"allowed_token_ids": draw.sample(range(500), 200), "skip_special_tokens": False}
    body |= some_of(draw, 0.2, {"stop_token_ids": draw.sample(range(3, 500), 3)})
    return body | {"ignore_eos": draw.random() < 0.8}


def of_chats(draw: random.Random, tags: dict[str, int]) -> Json:
    turn = {"role": "user", "content": draw.choice(OPENINGS)}
    think, over, call = (str(tags[tag]) for tag in (*THOUGHTS, "<tool_call>"))
    thinking = {think: draw.choice((30, 60)), over: draw.choice((25, 50, 58))}
    budget = draw.choice((-1, 0, 3, 10))
    body = draw.choice(
        (
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tools": TOOLS, "logit_bias": {call: draw.choice((3, 6, 9))}},
            {"response_format": OF_SCHEMA},
            {"response_format": {"type": "json_object"}},
            {"logit_bias": thinking, "frequency_penalty": 2, "min_tokens": 20, "thinking_token_budget": budget},
            {"logit_bias": thinking, "response_format": OF_SCHEMA, "thinking_token_budget": budget},
            {"messages": [turn, {"role": "assistant", "content": "Well, the"}], "continue_final_message": True},
            {"ignore_eos": True},
        )
    )
    if draw.random() < 0.3:
        body = body | {"logprobs": True, "top_logprobs": draw.choice((0, 3))}
    return {"messages": [turn], **body}


def of_responses(draw: random.Random, tokens: int) -> Json:
    tools = [{"type": "function", "strict": True, **function} for function in FUNCTIONS]
    written = {"format": {"type": "json_schema", "name": "words", "schema": SCHEMA, "strict": True}}
    body = draw.choice(({"tools": tools, "tool_choice": "required"}, {"text": written}, {}))
    if draw.random() < 0.3:
        body = body | {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    return {"input": draw.choice(OPENINGS), "max_output_tokens": tokens, "temperature": 0, **body}


async def hear(client: httpx.AsyncClient, ask: Ask) -> Any:
    """The answer without what is its own; a stream as the sum of its events. An error as what was said of it."""
    try:
        async with client.stream("POST", ask.path, json=ask.body) as response:
            raw = (await response.aread()).decode()
    except httpx.HTTPError as error:
        return f"error: {error!r}"
    if response.status_code != 200:
        return f"error: {response.status_code} {raw}"
    if not ask.body["stream"]:
        return without_own(json.loads(raw))
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if ask.path == RESPONSES:
        return of_events(events)
    return of_chunks(events) if lines[-1:] == ["[DONE]"] else "error: the stream broke off"


def of_chunks(events: Iterable[Json]) -> Any:
    """Of each choice its texts, lists and calls, put together from all chunks, and how it ended; the usage."""
    choices: dict[int, list[tuple[str, Any]]] = {}
    usage: Json = {}
    for event in events:
        if "error" in event:
            return f"error: {event['error']}"
        usage = without_own(event.get("usage")) or usage
        for choice in event["choices"]:
            found = choices.setdefault(choice["index"], [])
            found += [leaf for leaf in leaves(without_own(choice)) if leaf[1] not in ("", None)]
    return {number: joined(found) for number, found in choices.items()}, usage


def of_events(events: Sequence[Json]) -> Any:
    """The texts of all deltas by their kind and item, and the response at the end, which has it all once more."""
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        return "error: events out of turn"
    deltas = [(f"{event['type']}.{event['output_index']}", event["delta"]) for event in events if "delta" in event]
    return joined(deltas), without_own(events[-1].get("response", events[-1]))


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in objects and lists, by the names on the way to it. A call's number is one of them."""
    if isinstance(value, dict):
        own = f"{where}.{value['index']}" if "function" in value else where
        for name, inner in value.items():
            yield from leaves(inner, f"{own}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{where}[]")
    elif not where.endswith(".index"):
        yield where, value


def joined(found: Iterable[tuple[str, Any]]) -> Json:
    """Texts in a row as one text, all else in a row as a list."""
    made: Json = {}
    for name, value in found:
        if isinstance(value, str) and "[]" not in name.removesuffix(".arguments").replace(".tool_calls[]", ""):
            made[name] = made.get(name, "") + value
        else:
            made.setdefault(name, []).append(value)
    return made


def without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_own(inner) for name, inner in value.items() if name not in OWN}
    return [without_own(inner) for inner in value] if isinstance(value, list) else value


async def hear_all(server: Server, asks: Iterator[tuple[int, Ask]], places: int) -> list[tuple[int, Any]]:
    """So many answers at a time, each by the number of what was asked."""
    heard: list[tuple[int, Any]] = []

    async def place(client: httpx.AsyncClient) -> None:
        for number, ask in asks:
            heard.append((number, await hear(client, ask)))

    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(place(client) for _ in range(places)))
    return heard


def under_blows(server: Server, asks: Sequence[Ask], chosen: argparse.Namespace) -> tuple[list[tuple[int, Any]], int]:
    """What was said in so many seconds, and how many blows fell meanwhile."""
    end, draw, over = time.monotonic() + chosen.seconds, random.Random(chosen.first), threading.Event()

    def drawn() -> Iterator[tuple[int, Ask]]:
        while time.monotonic() < end:
            number = draw.randrange(len(asks))
            yield number, asks[number]

    blows: list[Struck] = []
    striker = threading.Thread(target=strike, args=(server, chosen.every, BLOWS[chosen.blow], 0, over, blows))
    striker.start()
    try:
        return asyncio.run(hear_all(server, drawn(), chosen.places)), len(blows)
    finally:
        over.set()
        striker.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=10, help="seconds between two blows")
    parser.add_argument("--blow", choices=BLOWS, default="kill")
    parser.add_argument("--asks", type=int, default=120, help="different requests")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--places", type=int, default=16, help="requests at a time")
    parser.add_argument("--replicas", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, adapter, tags = model_of_all(Path(name))
        options = ServeOptions(
            model=str(model), adapter=str(adapter), device="cpu", replicas=chosen.replicas, threads=1,
            dtype="float32", generation_config="none",
        )  # fmt: skip
        asks = [draw_ask(number, tags) for number in range(chosen.first, chosen.first + chosen.asks)]
        with running(start_with(Path(name), options, cpus=chosen.replicas + 1)) as server:
            wait_for_replicas(server, chosen.replicas)
            expected = dict(asyncio.run(hear_all(server, iter(enumerate(asks)), chosen.places)))
            refused = [said for said in expected.values() if str(said).startswith("error")]
            assert not refused, f"{len(refused)} refused while nobody was hit, for example {refused[0]}"
            heard, blows = under_blows(server, asks, chosen)
            handed_over = server.metric("tidar:stream_handovers_total")
    # Where all replicas have just started, one that has a grammar to compile may see four die before its next token.
    whole = [(number, said) for number, said in heard if "The server gave up" not in str(said)]
    different = [(number, said) for number, said in whole if said != expected[number]]
    print(
        f"{len(heard)} answers to {len(asks)} requests, {blows} blows, {handed_over:.0f} hand-overs: "
        f"{len(different)} different, {len(heard) - len(whole)} given up"
    )
    for number, said in different:
        print(f"{chosen.first + number}: {asks[number]}\n  said {said}\n  not  {expected[number]}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
