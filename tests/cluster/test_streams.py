"""Tokens that become text and traces, several streams that become one."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine_thread import Refusal
from cluster.errors import ApiError
from cluster.responses import Gathered, chunk, logprobs_of, new_head, whole
from cluster.streams import Admission, Answer, Choice, Piece, finished_well, merge, requests_for
from tests.cluster.test_schemas import card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams, StepOutput, StepTrace, TokenLogprobs

TOKENIZER = tiny_tokenizer()
CARD = card_for(TOKENIZER)


def choice(trace: bool = False, **params: Any) -> Choice:
    requests = requests_for("answer", [(1, 2, 3)], [SamplingParams(max_tokens=50, **params)])
    return Answer(CARD, requests, trace).choices[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids


def output(tokens: list[int], finish: Finish | None = None, drafted: tuple[int, ...] = ()) -> StepOutput:
    """A step whose drafts held as far as they are its tokens; the last token is the model's own."""
    accepted = len(tokens) - 1
    trace = StepTrace(
        step=3,
        seconds=0.0125,
        drafted=(*tokens[:accepted], *drafted),
        accepted=accepted,
        anchor=tokens[-1],
        block=4,
        proposals=(1, 2),
        used=None,
        verify_rows=4,
        mask_rows=8,
    )
    return StepOutput("answer-0", tuple(tokens), trace, finish)


def test_the_id_that_ends_an_answer_is_counted_and_not_shown() -> None:
    growing = choice()
    piece = growing.add(output([*ids("dog"), 2], Finish(FinishReason.STOP, 2)), "r1")
    assert piece.text == "dog"
    assert growing.completion_tokens == len(ids("dog")) + 1


def test_a_stop_string_is_cut_out_and_what_only_began_one_is_shown() -> None:
    stopped = choice(stop=("fox",))
    assert stopped.add(output(ids("the quick fo")), "r1").text == "the quick "
    assert stopped.add(output(ids("x"), Finish(FinishReason.STOP, "fox")), "r1").text == ""
    ended = choice(stop=("fox",))
    ended.add(output(ids("the quick fo")), "r1")
    assert ended.add(output(ids(" d"), Finish(FinishReason.LENGTH)), "r1").text == "fo d"


def test_a_character_over_several_steps_is_shown_once_it_is_whole() -> None:
    growing = choice()
    parts = ids("é€")
    shown = [growing.add(output([token]), "r1").text for token in parts]
    assert "".join(shown) == "é€"
    assert "�" not in "".join(shown)


def test_the_trace_is_the_wire_format() -> None:
    growing = choice(trace=True)
    held, said, missed = ids("dog")[0], ids("fox")[0], ids("over")[0]
    piece = growing.add(output([held, said], drafted=(missed, 1)), "r1")

    def spelled(token: int) -> dict[str, Any]:
        return {"id": token, "text": TOKENIZER.decode([token])}

    assert piece.trace == {
        "step": 3,
        "t_ms": 12.5,
        "drafted": [spelled(held), spelled(missed), {"id": 1, "text": "<|im_start|>"}],
        "accepted": 1,
        "anchor": spelled(said),
        "block": 4,
        "proposals": [{"a": 1}, {"a": 2}],
        "used": None,
        "rows": {"verify": 4, "mask": 8},
        "replica": "r1",
    }


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 4), min_size=1))
def test_the_spelled_tokens_together_are_the_text(text: str, sizes: list[int]) -> None:
    growing = choice(trace=True)
    tokens = ids(text)
    spelled, shown, place = "", "", 0
    while place < len(tokens):
        run = tokens[place : place + sizes[place % len(sizes)]]
        place += len(run)
        finish = Finish(FinishReason.LENGTH) if place >= len(tokens) else None
        piece = growing.add(output(run, finish), "r1")
        assert piece.trace is not None
        shown += piece.text
        spelled += "".join(item["text"] for item in (*piece.trace["drafted"], piece.trace["anchor"]))
    assert shown == spelled == text


def test_events_that_end_an_answer_badly() -> None:
    for event, status in (
        (Refusal("a", "too much", "max_tokens"), 400),
        (StepOutput("a", (), finish=Finish(FinishReason.ERROR, error="no memory")), 500),
    ):
        with pytest.raises(ApiError) as caught:
            finished_well(event)
        assert caught.value.status == status


async def source(name: str, count: int, closed: list[str], fail: bool = False) -> AsyncGenerator[str, None]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield f"{name}{number}"
        if fail:
            raise ApiError(503, "gone")
    finally:
        closed.append(name)


def test_merged_streams_keep_their_order() -> None:
    async def run() -> tuple[list[str], list[str]]:
        closed: list[str] = []
        items = [item async for item in merge([source("a", 3, closed), source("b", 5, closed)])]
        return items, closed

    items, closed = asyncio.run(run())
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert [item for item in items if item[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_closing_the_merged_stream_closes_all(streams: int) -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        merged = merge([source(f"s{number}", 1000, closed) for number in range(streams)])
        await anext(merged)
        await merged.aclose()
        return closed

    assert sorted(asyncio.run(run())) == [f"s{number}" for number in range(streams)]


def test_one_streams_error_ends_the_others() -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        with pytest.raises(ApiError, match="gone"):
            async for _ in merge([source("a", 2, closed, fail=True), source("b", 1000, closed)]):
                pass
        return closed

    assert sorted(asyncio.run(run())) == ["a", "b"]


def test_each_prompt_is_a_choice_of_its_own() -> None:
    params = SamplingParams(max_tokens=5, seed=4)
    answer = Answer(CARD, requests_for("answer", [(1,), (2, 3)], [params, params]), trace=False)
    answer.choices[0].add(output([7, 8]), "r1")
    assert [one.prompt_tokens for one in answer.choices] == [1, 2]
    assert answer.metrics()["tidar"] == {"decode_steps": 1, "tokens_per_step": 2.0, "seed": 4}
    assert answer.choices[0].add(output([9]), "r1") == Piece(0, TOKENIZER.decode([9]))


def test_offsets_of_a_streams_tokens_are_those_of_the_whole_answer() -> None:
    """Even where a step shows less than its tokens, for a stop string may have begun or a character is not whole."""
    tokens = ids("the quick 東京 fo")
    entries = [TokenLogprobs(token, -0.5, ()) for token in tokens]
    growing = choice(logprobs=0, stop=("fox",))
    answer = Answer(CARD, requests_for("answer", [(1,)], [SamplingParams(max_tokens=50, logprobs=0)]), trace=False)
    offsets: list[int] = []
    for token, entry in zip(tokens, entries, strict=True):
        piece = growing.add(replace(output([token]), logprobs=(entry,)), "r1")
        told = logprobs_of(new_head("tiny", False), answer, 0, piece.logprobs, piece.offset)
        assert told is not None
        offsets += told["text_offset"]
    together = logprobs_of(new_head("tiny", False), answer, 0, entries)
    assert together is not None
    assert offsets == together["text_offset"] == sorted(set(offsets))


def test_a_request_at_fault_is_told_so_after_it_was_let_in() -> None:
    finish = Finish(FinishReason.ERROR, error="the grammar cannot be used", param="grammar")
    with pytest.raises(ApiError) as caught:
        finished_well(StepOutput("answer-0", (), finish=finish))
    assert (caught.value.status, caught.value.param) == (400, "grammar")


def test_a_stop_string_within_min_tokens_is_text() -> None:
    growing = choice(stop=("dog",), min_tokens=len(ids("dog")))
    assert growing.add(output(ids("dog")), "r1").text == "dog"
    assert growing.add(output(ids(" dog")), "r1").text == " "


def test_places_are_given_back_however_a_request_ends() -> None:
    admission = Admission(per_replica=2)
    with admission.enter(3, replicas=2):
        with pytest.raises(ApiError, match="full"), admission.enter(2, replicas=2):
            pass
        with pytest.raises(ValueError, match="oops"), admission.enter(1, replicas=2):
            raise ValueError("oops")
        assert admission.under_way == 3
    assert admission.under_way == 0
    with admission.enter(100, replicas=1):
        assert admission.under_way == 100


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_fit_openais_objects(chat: bool) -> None:
    params = SamplingParams(max_tokens=5, logprobs=1)
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]), trace=False)
    entries = tuple(TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in (300, 301))
    finish = Finish(FinishReason.LENGTH)
    piece = answer.choices[0].add(StepOutput("answer-0", (300, 301), finish=finish, logprobs=entries), "r1")
    head, gathered = new_head("tiny", chat), Gathered()
    gathered.add(piece)
    for raw in (whole(head, answer, [gathered]), chunk(head, answer, piece, True, False)[6:]):
        logprobs = json.loads(raw)["choices"][0]["logprobs"]
        if chat:
            assert b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]).decode() == piece.text
            assert [entry["logprob"] for entry in logprobs["content"]] == [-0.5, -0.5]
        else:
            assert "".join(logprobs["tokens"]) == piece.text
            assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]
