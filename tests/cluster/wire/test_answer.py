"""Tokens that become text, thoughts, calls and traces."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cluster.wire.answer import Answer, Choice, Piece, ResponseOptions, joined, requests_for, runs
from cluster.wire.thoughts import Thinking
from cluster.wire.tool_calls import HERMES, CallDelta
from cluster.wire.tools import Toolbox
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams, StepOutput, StepTrace, TokenLogprobs

TOKENIZER = tiny_tokenizer()
CARD = card_for(TOKENIZER)


def choice(trace: bool = False, **params: Any) -> Choice:
    requests = requests_for("answer", [(1, 2, 3)], [SamplingParams(max_tokens=50, **params)])
    return Answer(CARD, requests, ResponseOptions(trace=trace)).choices[0]


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


@pytest.mark.parametrize("trace", [True, False])
def test_added_tokens_are_read_once_for_all_choices_and_answers(trace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them take milliseconds, and streams wait meanwhile."""
    asked: list[str] = []

    class Noted:
        def __init__(self, backend: Tokenizer):
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(self._backend, name)

    monkeypatch.setattr(PreTrainedTokenizerFast, "backend_tokenizer", property(lambda self: Noted(self._tokenizer)))
    card = card_for(deepcopy(TOKENIZER))
    for answer in ("a", "b"):
        Answer(
            card, requests_for(answer, [(1, 2)] * 5, [SamplingParams(max_tokens=5)] * 5), ResponseOptions(trace=trace)
        )
    assert asked.count("get_added_tokens_decoder") == 1


THINKS = Thinking("<think>", "</think>", None, begun=False)
BOX = Toolbox(HERMES, {"now": {}}, True, None)
CALL = HERMES.head("now") + "{}" + HERMES.tail


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        (f"<think>\nHm.\n</think>\n\n< Sure. {CALL} done <to", ["< Sure.", " done <to"]),
        (f"{CALL}\n{CALL}", []),
        (f"a{CALL}\n", ["a"]),
        ("é€ fo", ["é€ fo"]),
        ("é€ fox", ["é€ "]),
    ],
)
@given(data=st.data())
def test_each_text_has_the_log_probabilities_of_its_own_tokens_however_an_answer_is_cut(
    said: str, texts: list[str], data: st.DataObject
) -> None:
    """They had gone to whatever text was told next to them: drafts that held changed whose they were."""
    params = [SamplingParams(max_tokens=50, logprobs=0, stop=("fox",))]
    requests = requests_for("answer", [(1,)], params)
    growing = Answer(CARD, requests, by_part=True, tools=BOX, thinking=THINKS).choices[0]
    tokens = ids(said)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1))))
    pieces = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        run = tuple(tokens[start:end])
        finish = Finish(FinishReason.LENGTH) if end == len(tokens) else None
        entries = tuple(TokenLogprobs(token, -0.5, ()) for token in run)
        pieces.append(growing.add(StepOutput("answer-0", run, None, finish, entries), "r1"))
    whole = joined(pieces)
    told = [
        (part, "".join(TOKENIZER.decode([entry.token for entry in share])))
        for part, share in zip(whole.told, whole.shares, strict=True)
        if isinstance(part, str)
    ]
    assert [part for part, _ in told if part] == texts
    assert [spelled.removesuffix("fox").lstrip() for part, spelled in told if part] == [text.lstrip() for text in texts]
    assert sum(len(share) for share in whole.shares) <= len(tokens)


@given(data=st.data())
def test_tokens_of_thoughts_are_as_many_however_an_answer_is_cut(data: st.DataObject) -> None:
    """A tag of several tokens, whose step brings words of the answer too."""
    requests = requests_for("answer", [(1,)], [SamplingParams(max_tokens=50)])
    growing = Answer(CARD, requests, thinking=THINKS).choices[0]
    assert growing.thoughts is not None
    thought, said = ids("<think>\nHm.\n</think>"), ids("\n\nSure, two of them.")
    tokens = [*thought, *said, 2]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1))))
    for start, end in pairwise([0, *cuts, len(tokens)]):
        finish = Finish(FinishReason.STOP, 2) if end == len(tokens) else None
        growing.add(output(tokens[start:end], finish), "r1")
    assert growing.thoughts.tokens == len(thought)


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


def test_each_prompt_is_a_choice_of_its_own() -> None:
    params = SamplingParams(max_tokens=5, seed=4)
    answer = Answer(CARD, requests_for("answer", [(1,), (2, 3)], [params, params]))
    answer.choices[0].add(output([7, 8]), "r1")
    assert [one.prompt_tokens for one in answer.choices] == [1, 2]
    assert answer.metrics()["tidar"] == {"decode_steps": 1, "tokens_per_step": 2.0, "seed": 4}
    assert answer.choices[0].add(output([9]), "r1") == Piece(0, (TOKENIZER.decode([9]),), tokens=(9,))


def test_a_stop_string_within_min_tokens_is_text() -> None:
    growing = choice(stop=("dog",), min_tokens=len(ids("dog")))
    assert growing.add(output(ids("dog")), "r1").text == "dog"
    assert growing.add(output(ids(" dog")), "r1").text == " "


def test_joined_pieces_lose_nothing() -> None:
    entries = [TokenLogprobs(token, -0.5, 1, ()) for token in range(4)]
    calls = (CallDelta(0, "", "id", "f"), CallDelta(0, "{"), CallDelta(0, "}"), CallDelta(1, "", "id2", "g"))
    parts = [
        Piece(1, ("a", calls[0]), None, None, (entries[0],), (0,)),
        Piece(1, (calls[1],), None, None, (), (5,)),
        Piece(1, (calls[2], "b", calls[3]), Finish(FinishReason.STOP), None, tuple(entries[1:]), (1, 2, 3)),
    ]
    whole_piece = joined(parts)
    assert (whole_piece.choice, whole_piece.text) == (1, "ab")
    assert whole_piece.logprobs == tuple(entries)
    assert whole_piece.tokens == (0, 5, 1, 2, 3)
    assert whole_piece.finish == Finish(FinishReason.STOP)
    assert whole_piece.told == ("a", CallDelta(0, "{}", "id", "f"), "b", CallDelta(1, "", "id2", "g"))
    assert whole_piece.calls == (CallDelta(0, "{}", "id", "f"), CallDelta(1, "", "id2", "g")) == runs(calls)


def test_a_prompt_of_several_choices_is_cached_once() -> None:
    params = [SamplingParams(max_tokens=5, choice=number) for number in range(3)]
    answer = Answer(CARD, requests_for("answer", [tuple(range(80))] * 3, params))
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
