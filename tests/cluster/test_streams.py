"""Tokens that become text and traces, several streams that become one."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from cluster.errors import ApiError
from cluster.handover import News
from cluster.line import Refusal
from cluster.responses import chunk, logprobs_of, new_head, streamed_logprobs, whole
from cluster.streams import (
    LONGEST_INTERVAL_SECONDS,
    Admission,
    Answer,
    Choice,
    Pace,
    Piece,
    finished_well,
    joined,
    merge,
    requests_for,
    runs,
)
from cluster.tool_calls import CallDelta
from tests.cluster.test_schemas import card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput, StepTrace, TokenLogprobs

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
        return list(closed)

    assert sorted(asyncio.run(run())) == [f"s{number}" for number in range(streams)]


def test_one_streams_error_ends_the_others() -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        with pytest.raises(ApiError, match="gone"):
            async for _ in merge([source("a", 2, closed, fail=True), source("b", 1000, closed)]):
                pass
        return list(closed)

    assert sorted(asyncio.run(run())) == ["a", "b"]


def test_each_prompt_is_a_choice_of_its_own() -> None:
    params = SamplingParams(max_tokens=5, seed=4)
    answer = Answer(CARD, requests_for("answer", [(1,), (2, 3)], [params, params]), trace=False)
    answer.choices[0].add(output([7, 8]), "r1")
    assert [one.prompt_tokens for one in answer.choices] == [1, 2]
    assert answer.metrics()["tidar"] == {"decode_steps": 1, "tokens_per_step": 2.0, "seed": 4}
    assert answer.choices[0].add(output([9]), "r1") == Piece(0, (TOKENIZER.decode([9]),))


def test_offsets_of_a_streams_tokens_are_those_of_the_whole_answer() -> None:
    """Even where a step shows less than its tokens, for a stop string may have begun or a character is not whole."""
    tokens = ids("the quick 東京 fo")
    entries = [TokenLogprobs(token, -0.5, ()) for token in tokens]
    params = SamplingParams(max_tokens=50, logprobs=0, stop=("fox",))
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]), trace=False)
    offsets: list[int] = []
    before: dict[int, int] = {}
    for token, entry in zip(tokens, entries, strict=True):
        piece = answer.choices[0].add(output([token])._replace(logprobs=(entry,)), "r1")
        told = streamed_logprobs(new_head("tiny", False), answer, piece, before)
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
    head = new_head("tiny", chat)
    streamed = chunk(head, answer, piece, streamed_logprobs(head, answer, piece, {}), True, False, False)
    for raw in (whole(head, answer, [piece]), streamed[6:]):
        logprobs = json.loads(raw)["choices"][0]["logprobs"]
        if chat:
            assert b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]).decode() == piece.text
            assert [entry["logprob"] for entry in logprobs["content"]] == [-0.5, -0.5]
        else:
            assert "".join(logprobs["tokens"]) == piece.text
            assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]


def test_parts_of_characters_are_told_apart_by_their_bytes() -> None:
    parts = ids("€")
    entry = TokenLogprobs(parts[0], -0.5, tuple((token, -0.5) for token in parts))
    answer = Answer(CARD, requests_for("answer", [(1,)], [SamplingParams(max_tokens=5, logprobs=3)]), trace=False)
    logprobs = logprobs_of(new_head("tiny", chat=False), answer, 0, [entry])
    assert logprobs is not None
    (likeliest,) = logprobs["top_logprobs"]
    assert len(likeliest) == len(parts) > 1
    assert logprobs["tokens"] == list(likeliest)[:1]
    assert "".join(name.removeprefix("bytes:") for name in likeliest) == r"\xe2\x82\xac"


def test_a_whole_answers_log_probabilities_are_made_without_a_detour() -> None:
    """They are made at once, and all streams wait: by way of OpenAI's types it took more than twice as long."""
    params = SamplingParams(max_tokens=5000, logprobs=20)
    entry = TokenLogprobs(300, -0.5, tuple((token, -0.5) for token in range(300, 320)))
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]), trace=False)
    finish = answer.choices[0].finish = Finish(FinishReason.STOP)
    head, piece = new_head("tiny", True), Piece(0, ("ab",), finish, None, (entry,) * 500)
    body = whole(head, answer, [piece])

    def seconds(work: Callable[[], object]) -> float:
        before = time.thread_time()
        work()
        return time.thread_time() - before

    pairs = [(seconds(lambda: whole(head, answer, [piece])), seconds(lambda: json.loads(body))) for _ in range(9)]
    assert median(writing / reading for writing, reading in pairs) < 6
    ChatCompletion.model_validate_json(body)


class Told:
    """A carrier that brings what the test says."""

    def __init__(self, *news: tuple[StepOutput | Refusal, ...]):
        self._news = news

    async def run(self, request: Request, base: str) -> AsyncGenerator[News, None]:
        for events in self._news:
            yield News("r1", events)


def pieces_of(told: Told, pace: Pace | None = None, trace: bool = False) -> tuple[list[Piece], ApiError | None]:
    async def run() -> tuple[list[Piece], ApiError | None]:
        found: list[Piece] = []
        requests = requests_for("answer", [(1, 2, 3)], [SamplingParams(max_tokens=50)])
        answer = Answer(CARD, requests, trace)
        try:
            async for piece in answer.pieces(told, Admission(4), 1, pace):  # type: ignore[arg-type]
                found.append(piece)
        except ApiError as error:
            return found, error
        return found, None

    return asyncio.run(run())


STEPS = [output(ids(word)) for word in ("the", " quick", " brown")]
LAST = output(ids(" fox"), Finish(FinishReason.LENGTH))


@pytest.mark.parametrize("trace", [False, True])
def test_steps_that_come_together_are_one_piece_unless_they_are_traced(trace: bool) -> None:
    apart, _ = pieces_of(Told(*[(step,) for step in (*STEPS, LAST)]), trace=trace)
    together, _ = pieces_of(Told(tuple(STEPS), (LAST,)), trace=trace)
    assert "".join(piece.text for piece in together) == "".join(piece.text for piece in apart)
    assert [piece.finish for piece in together][-1] == Finish(FinishReason.LENGTH)
    assert len(together) == (4 if trace else 2)
    assert all((piece.trace is not None) == trace for piece in together)


def test_what_came_before_an_error_is_told_first() -> None:
    broken = StepOutput("answer-0", (), None, Finish(FinishReason.ERROR, error="it broke"))
    pieces, error = pieces_of(Told((*STEPS, broken)))
    assert "".join(piece.text for piece in pieces) == "the quick brown"
    assert error is not None
    assert error.status == 500


def test_joined_pieces_lose_nothing() -> None:
    entries = [TokenLogprobs(token, -0.5, 1, ()) for token in range(4)]
    calls = (CallDelta(0, "", "id", "f"), CallDelta(0, "{"), CallDelta(0, "}"), CallDelta(1, "", "id2", "g"))
    parts = [
        Piece(1, ("a", calls[0]), None, None, (entries[0],)),
        Piece(1, (calls[1],), None, None, ()),
        Piece(1, (calls[2], "b", calls[3]), Finish(FinishReason.STOP), None, tuple(entries[1:])),
    ]
    whole_piece = joined(parts)
    assert (whole_piece.choice, whole_piece.text) == (1, "ab")
    assert whole_piece.logprobs == tuple(entries)
    assert whole_piece.finish == Finish(FinishReason.STOP)
    assert whole_piece.told == ("a", CallDelta(0, "{}", "id", "f"), "b", CallDelta(1, "", "id2", "g"))
    assert whole_piece.calls == (CallDelta(0, "{}", "id", "f"), CallDelta(1, "", "id2", "g")) == runs(calls)


def test_a_pace_is_shared_by_streams_alone_and_never_slow() -> None:
    pace = Pace(100)
    assert pace.interval("cpu") == 0
    with pace.stream(), pace.stream():
        assert pace.interval("cpu") == pytest.approx(0.02)
    assert pace.interval("cpu") == 0
    assert 0 < LONGEST_INTERVAL_SECONDS <= 0.25
    with ExitStack() as many:
        for _ in range(1000):
            many.enter_context(pace.stream())
        assert pace.interval("cpu") == LONGEST_INTERVAL_SECONDS
    for device in ("cpu", "cuda"):
        with (unset := Pace(0)).stream():
            assert unset.interval(device) > 0


def test_a_stream_counts_from_its_first_piece_to_its_end() -> None:
    pace, seen = Pace(1000), []

    class Looking(Told):
        async def run(self, request: Request, base: str) -> AsyncGenerator[News, None]:
            async for news in super().run(request, base):
                seen.append(pace.interval("cpu") > 0)
                yield news

    pieces_of(Looking(*[(step,) for step in (*STEPS, LAST)]), pace)
    assert seen == [False, True, True, True]
    assert pace.interval("cpu") == 0


def test_a_prompt_of_several_choices_is_cached_once() -> None:
    params = [SamplingParams(max_tokens=5, choice=number) for number in range(3)]
    answer = Answer(CARD, requests_for("answer", [tuple(range(80))] * 3, params), trace=False)
    for one in answer.choices:
        step = output([7])
        assert step.trace is not None
        one.add(step._replace(trace=step.trace._replace(cached=64)), "r1")
    assert [one.cached_tokens for one in answer.choices] == [64, 0, 0]
    assert [one.prompt_tokens for one in answer.choices] == [80, 0, 0]


def test_the_id_that_ends_an_answer_has_no_log_probability() -> None:
    growing = choice(logprobs=0)
    tokens = [*ids("dog"), 2]
    entries = tuple(TokenLogprobs(token, -0.5, ()) for token in tokens)
    piece = growing.add(output(tokens, Finish(FinishReason.STOP, 2))._replace(logprobs=entries), "r1")
    assert piece.logprobs == entries[:-1]


def test_requests_carry_salt_and_priority() -> None:
    params = [SamplingParams(max_tokens=5)] * 2
    made = requests_for("answer", [(1,), (2,)], params, cache_salt="tenant", priority=-3)
    assert [(one.request_id, one.cache_salt, one.priority) for one in made] == [
        ("answer-0", "tenant", -3), ("answer-1", "tenant", -3),
    ]  # fmt: skip
