"""Steps planned while one runs: the same tokens and the same drafts as one step at a time."""

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tidar_core.engines import tiny_engine
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import EngineAnswer
from tidar_core.config import EngineConfig
from tidar_core.engine import Engine, flight, load_engine, penalties_ahead
from tidar_core.grammar.grammar import Grammar
from tidar_core.kernels import rules
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.layout import WithinBlock
from tidar_core.request import FinishReason, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=4)
KEPT = replace(SAMPLED, top_k=40, top_p=0.9, min_p=0.01)


def prompts(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(count)
    return [tuple(draw.randrange(3, 512) for _ in range(draw.choice((1, 9, 33)))) for _ in range(count)]


def answers(engine: Engine, params: list[SamplingParams], alone: str = "") -> tuple[list[EngineAnswer], int]:
    """Answers to a prompt each, and behind how many steps the next was under way; while the request `alone` runs there
    must be none."""
    found = {str(index): EngineAnswer() for index in range(len(params))}
    for (name, prompt), chosen in zip(zip(found, prompts(len(params)), strict=True), params, strict=True):
        engine.submit(Request(name, prompt, chosen))
    overlapped = 0
    while engine.has_work:
        for output in engine.step():
            answer = found[output.request_id]
            answer.tokens += output.tokens
            answer.finish = output.finish
            if output.trace is not None:
                answer.steps.append(output.trace)
        overlapped += engine._flight is not None
        assert engine._flight is None or all(s.request.request_id != alone for s in engine._scheduler.running)
    return list(found.values()), overlapped


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, KEPT], ids=["greedy", "sampled", "a part of the vocabulary"])
def test_the_same_is_said_and_drafted(tmp_path: Path, within_block: WithinBlock, params: SamplingParams) -> None:
    """With everything drafted a step is what came before it alone; only where an answer is about to end may a step that
    was planned for the most that might have come draft less."""
    asked = [replace(params, max_tokens=60, drafts="full", block=block) for block in (None, 3, None, 2, None)]
    asked.append(replace(params, max_tokens=60, drafts="off"))
    one, none = answers(tiny_engine(tmp_path / "one", within_block=within_block), asked)
    two, overlapped = answers(tiny_engine(tmp_path / "two", within_block=within_block, overlap_steps=True), asked)
    assert none == 0
    assert overlapped > 20
    for ours, theirs in zip(two, one, strict=True):
        assert ours.tokens == theirs.tokens
        sure = [step for step in theirs.steps if step.step <= theirs.decode_steps - 8]
        for mine, other in zip(ours.steps, sure, strict=False):
            alike = {"verify_rows": 0, "mask_rows": 0, "seconds": 0.0}
            assert mine._replace(**alike) == other._replace(**alike)
            assert mine.verify_rows >= other.verify_rows
            assert mine.mask_rows >= other.mask_rows
    assert sum(step.accepted for answer in two for step in answer.steps) > 0


@pytest.mark.parametrize("one_call", [True, False], ids=["the CPU's one call", "slot by slot"])
def test_rules_that_stay_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_call: bool) -> None:
    """Over the steps that lay the same rows; only where they stand is new in each of them."""
    engine, read, asked = tiny_engine(tmp_path, overlap_steps=True), [], []
    if not one_call:
        engine._runner = replace(engine._runner, ops=replace(engine._runner.ops, draft_slots=None))
    numbers, launch = rules._numbers, flight.launch

    def noted(*arguments: Any) -> flight.Flight:
        launched = launch(*arguments)
        asked.append(launched.asked)
        return launched

    monkeypatch.setattr(rules, "_numbers", lambda *arguments: read.append(0) or numbers(*arguments))
    monkeypatch.setattr("tidar_core.engine.engine.launch", noted)
    answers(engine, [replace(SAMPLED, drafts="full")] * 3)
    different = len({id(one) for one in asked})
    assert len(asked) > 2 * different
    assert len(read) <= 2 * different  # of the verify rows and of the slots


@pytest.mark.parametrize("adapter", ["none", "own"])
def test_plain_decoding_is_planned_ahead_too(tmp_path: Path, adapter: str) -> None:
    drafting = {} if adapter == "own" else {"adapter": adapter}
    asked = [replace(params, drafts="off") for params in (GREEDY, SAMPLED, GREEDY)]
    one, _ = answers(tiny_engine(tmp_path / "one", **drafting), asked)
    two, overlapped = answers(tiny_engine(tmp_path / "two", overlap_steps=True, **drafting), asked)
    assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
    assert overlapped == 39  # nothing is planned behind a last token


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_what_was_said_counts_before_the_host_knows_it(
    tmp_path: Path, within_block: WithinBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and bias of all kinds, beside requests without: what the step under way says, and the drafts behind it,
    are counted on the device."""
    monkeypatch.setattr(penalties_ahead, "ROWS_AT_ONCE", 5)  # fewer than there are, and sequences lie across the runs
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"frequency_penalty": -0.3, "repetition_penalty": 0.9, "logit_bias": ((7, 3.0), (300, -100.0))},
        {"logit_bias": ((11, 2.5),)},
        {"allowed_token_ids": tuple(range(3, 90)), "logit_bias": ((7, 3.0), (300, 9.0)), "presence_penalty": 0.2},
        {},
    ]
    asked = [
        replace(params, max_tokens=50, drafts=mode, **change)
        for change in changes
        for params, mode in ((GREEDY, "full"), (SAMPLED, "off"), (KEPT, "full"))
    ]
    one, none = answers(tiny_engine(tmp_path / "one", within_block=within_block), asked)
    two, overlapped = answers(tiny_engine(tmp_path / "two", within_block=within_block, overlap_steps=True), asked)
    assert (none, overlapped > 20) == (0, True)
    assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
    plain = answers(tiny_engine(tmp_path / "three", within_block=within_block), asked[-3:] * len(changes))[0]
    assert sum(ours.tokens != theirs.tokens for ours, theirs in zip(two, plain, strict=True)) >= 9
    assert sum(step.accepted for answer in two for step in answer.steps) > 0


@pytest.mark.parametrize("slot_head", [0, 16])
def test_drafts_are_of_tokens_that_are_allowed(tmp_path: Path, slot_head: int) -> None:
    """Where few are, what a drafter knows of them is far from what it likes best; drafts hold all the same, whether the
    host waits for each step or not."""
    model = tiny_checkpoint(tmp_path / "model")
    adapter = tiny_adapter(tmp_path / "adapter", model, slot_head=slot_head)
    asked = [replace(GREEDY, drafts="full", max_tokens=100, allowed_token_ids=(401, 402))] * 4
    config = EngineConfig(str(model), str(adapter), "float32", "cpu")
    (one, _), (two, overlapped) = (
        answers(load_engine(replace(config, overlap_steps=over)), asked) for over in (False, True)
    )
    assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
    assert overlapped > 0
    for found in (one, two):
        drafted = [token for answer in found for step in answer.steps for token in step.drafted]
        assert set(drafted) <= {401, 402}
        assert sum(step.accepted for answer in found for step in answer.steps) > 100


@pytest.mark.parametrize(
    "waiting",
    [
        replace(GREEDY, logprobs=2),
        replace(GREEDY, grammar=Grammar("regex", "[a-z]{4,40}"), ignore_eos=False),
        replace(GREEDY, draft_trust=0.5),
        replace(GREEDY, bad_words=((7,), (300, 301))),
    ],
    ids=["logprobs", "grammar", "trust", "bad words"],
)
def test_what_the_host_decides_is_waited_for(tmp_path: Path, waiting: SamplingParams) -> None:
    """While such a request is there each step is over before the next; afterwards they overlap again."""
    asked = [replace(waiting, max_tokens=9), replace(GREEDY, drafts="full")]
    one, _ = answers(tiny_engine(tmp_path / "one"), asked)
    two, overlapped = answers(tiny_engine(tmp_path / "two", overlap_steps=True), asked, alone="0")
    assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
    assert overlapped > 0


def test_an_answer_that_stops_has_its_extra_step_dropped(tmp_path: Path) -> None:
    """Ends of sequence and stop strings come as a surprise, with the next step under way."""
    plain, engine = tiny_engine(tmp_path / "one"), tiny_engine(tmp_path / "two", overlap_steps=True)
    (whole,), _ = answers(plain, [SAMPLED])
    text = plain.tokenizer.decode(whole.tokens)
    asked = [
        replace(SAMPLED, stop_token_ids=frozenset(whole.tokens[12:13]), drafts="full"),
        replace(SAMPLED, stop=(text[20:23],), drafts="full"),
        replace(SAMPLED, drafts="full"),
    ]
    for chosen in asked:
        (expected,), _ = answers(plain, [chosen])
        (found,), _ = answers(engine, [chosen])
        assert found.tokens == expected.tokens
        assert found.finish == expected.finish
    assert engine.stats().pages_used == 0


def test_who_waits_for_pages_stops_nobody(tmp_path: Path) -> None:
    """Steps overlap while a prompt that does not fit waits; it comes in as soon as there is room."""
    engine = tiny_engine(tmp_path, overlap_steps=True, max_model_len=128, max_running=4, cache_tokens=128)
    engine.submit(Request("runs", (5,), replace(GREEDY, max_tokens=60, drafts="off")))
    engine.step()
    engine.submit(Request("waits", tuple(range(3, 125)), replace(GREEDY, max_tokens=2, drafts="off")))
    overlapped = steps = 0
    while engine._scheduler.waiting:
        engine.step()
        steps += 1
        overlapped += engine._flight is not None
    assert steps == 60  # one behind the last token of the other
    assert overlapped >= 56
    while engine.has_work:
        engine.step()


def test_who_was_refused_pages_comes_in_when_its_prefix_was_computed_for_another(tmp_path: Path) -> None:
    prompt = tuple(random.Random(0).randrange(3, 512) for _ in range(130))
    engine = tiny_engine(tmp_path, overlap_steps=True, cache_tokens=14 * 16, max_model_len=14 * 16)
    for choice in (0, 1):
        params = replace(SAMPLED, max_tokens=32, choice=choice, drafts="off", ignore_eos=True)
        engine.submit(Request(str(choice), prompt, params))
    first = {}
    for step in range(12):
        for output in engine.step():
            first.setdefault(output.request_id, step)
    assert first["1"] <= first["0"] + 3, "not only once the other is through"
    while engine.has_work:
        engine.step()


def test_no_row_runs_behind_the_last_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream that was handed over is cut, and all of its drafts hold up to there."""
    follows: dict[int, list[int]] = {}

    def oracle(runner: Any, slots: GuessedSlots) -> Tensor:
        each = zip(slots.anchors.tolist(), slots.counts, strict=True)
        picked = [(follows.get(anchor, []) + [3] * 8)[:n] for anchor, n in each]
        return torch.tensor([token for drafts in picked for token in drafts])

    engine = tiny_engine(tmp_path, overlap_steps=True)
    limit = engine.info.max_model_len
    runner, highest = engine._runner, []

    def carry(rows: Any, *further: Any) -> None:
        runner.ops.carry(rows, *further)
        highest.append(int(rows.positions.max()))

    engine._runner = replace(runner, ops=replace(runner.ops, carry=carry))
    plan_ahead, asked = engine._scheduler.plan_ahead, count()

    def now_and_then(under_way: Any) -> Any:
        return plan_ahead(under_way) if next(asked) % 3 else None

    monkeypatch.setattr(engine._scheduler, "plan_ahead", now_and_then)
    monkeypatch.setattr(flight, "pick_drafts", oracle)
    held = 0
    for room in range(14, 22):
        prompt = tuple(random.Random(room).randrange(3, 512) for _ in range(limit - room))

        def said(params: SamplingParams, name: str, prompt: tuple[int, ...] = prompt) -> tuple[list[int], int]:
            engine.submit(Request(name, prompt, params, cut=True))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            steps = [output.trace for output in outputs if output.trace is not None]
            return [token for output in outputs for token in output.tokens], sum(step.accepted for step in steps)

        alone = replace(GREEDY, max_tokens=100, ignore_eos=True)
        plain, _ = said(replace(alone, drafts="off"), f"plain {room}")
        follows.clear()
        for place, token in enumerate(plain):
            follows.setdefault(token, plain[place + 1 :])
        for block in (2, 3, 4):
            drafted, accepted = said(replace(alone, drafts="full", block=block), f"full {room} {block}")
            assert drafted == plain
            held += accepted
    assert held > 0
    assert highest
    assert max(highest) < limit


def test_who_goes_away_leaves_nothing(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, overlap_steps=True)
    for name in "ab":
        engine.submit(Request(name, (5, 6, 7), replace(GREEDY, drafts="full")))
    engine.step()
    assert engine._flight is not None
    engine.abort("a")
    (gone, other) = engine.step()
    assert (gone.request_id, other.request_id) == ("a", "b")
    engine.abort("b")
    (gone,) = engine.step()
    assert gone.finish is not None
    assert gone.finish.reason is FinishReason.ABORT
    assert not engine.has_work
    assert engine._flight is None
    assert engine.stats().pages_used == 0


def test_scores_that_are_no_numbers_end_their_own_request_alone(tmp_path: Path) -> None:
    """A token that poisons what comes behind it is picked while the next step is planned already."""
    model = tiny_checkpoint(tmp_path / "poisoned", tied=False)
    plain = load_engine(EngineConfig(str(model), "none", "float32", "cpu"))
    (whole, other), _ = answers(plain, [GREEDY, GREEDY])
    token = next(token for token in whole.tokens[9:] if token not in other.tokens)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    engine = load_engine(EngineConfig(str(model), "none", "float32", "cpu", overlap_steps=True))
    (broken, fine), overlapped = answers(engine, [GREEDY, GREEDY])
    assert overlapped > 0
    assert broken.tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert broken.finish is not None
    assert broken.finish.reason is FinishReason.ERROR
    assert fine.tokens == other.tokens


def test_min_tokens_holds_with_steps_ahead(tmp_path: Path) -> None:
    one, two = tiny_engine(tmp_path / "one"), tiny_engine(tmp_path / "two", overlap_steps=True)
    (free,), _ = answers(one, [GREEDY])
    late = replace(GREEDY, min_tokens=12, stop_token_ids=frozenset(free.tokens[:8]))
    (expected,), _ = answers(one, [late])
    (found,), _ = answers(two, [late])
    assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
    assert len(found.tokens) > 12


def test_a_prompt_is_read_with_steps_ahead(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, overlap_steps=True)
    engine.submit(Request("r", (5, 6, 7, 8), replace(GREEDY, prompt_logprobs=1)))
    read = []
    while engine.has_work:
        read += [entry.token for output in engine.step() for entry in output.prompt_logprobs]
    assert read == [6, 7, 8]


def test_rows_that_ran_for_drafts_that_did_not_come_are_told(tmp_path: Path) -> None:
    (answer,), _ = answers(tiny_engine(tmp_path, overlap_steps=True), [replace(GREEDY, drafts="full")])
    assert any(step.verify_rows > 1 + len(step.drafted) for step in answer.steps)


def test_who_comes_while_steps_are_ahead_is_let_in_at_once(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, overlap_steps=True)
    engine.submit(Request("runs", (5, 6, 7), replace(GREEDY, drafts="off")))
    for _ in range(3):
        engine.step()
    assert engine._flight is not None
    engine.submit(Request("comes", (8, 9), replace(GREEDY, max_tokens=2, drafts="off")))
    said = [output.request_id for _ in range(4) for output in engine.step()]
    assert "comes" in said, "not only once all others are through"
    while engine.has_work:
        engine.step()
