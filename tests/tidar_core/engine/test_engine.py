"""The whole engine on tiny checkpoints: drafts change the speed, never the text; nothing leaks."""

import random
from dataclasses import replace
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tidar_core.engines import pages_are_accounted_for, prompts, tiny_engine
from tests.tidar_core.ways import decode_ways
from tests.tiny import tiny_checkpoint
from tidar_core.bench.drive import EngineAnswer, answer_all
from tidar_core.bench.exact import compare_ways, sampled_params
from tidar_core.config import Architecture, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter
from tidar_core.request import Finish, FinishReason, Request, RequestError, SamplingParams
from tidar_core.text import TextStream

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("architecture", "within_block"),
    [*((each, "bidirectional") for each in get_args(Architecture)), ("qwen3", "causal"), ("gemma3_text", "causal")],
)
def test_greedy_answers_are_transformers_own(tmp_path, architecture, within_block):
    engine = tiny_engine(tmp_path, architecture, within_block)
    assert engine.info.exact
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    chosen = prompts(4)
    ways = decode_ways(engine, chosen, lambda mode: replace(GREEDY, drafts=mode), 4)
    for index, prompt in enumerate(chosen):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, min_new_tokens=24,
            eos_token_id=-1, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        for way, answers in ways.items():
            assert answers[index] == expected, way


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_answers_do_not_depend_on_drafts_or_batch(tmp_path, dtype):
    engine = tiny_engine(tmp_path, dtype=dtype)
    assert engine.info.exact
    ways = decode_ways(engine, prompts(6), lambda mode: sampled_params(32, mode), 6)
    assert all(comparison.different == 0 for comparison in compare_ways(ways))


def test_drafting_happens_and_some_drafts_hold(engine):
    (answer,) = answer_all(engine, prompts(1), [replace(GREEDY, max_tokens=200, drafts="full")])
    assert sum(step.accepted for step in answer.steps) > 0
    assert any(step.accepted < len(step.drafted) for step in answer.steps)
    assert answer.decode_steps < 199
    assert len(answer.tokens) == 200


def test_traces_tell_the_tokens(engine):
    (answer,) = answer_all(engine, prompts(1, seed=5), [replace(GREEDY, max_tokens=100, drafts="full")])
    rebuilt = []
    for step in answer.steps:
        rebuilt += step.drafted[: step.accepted]
        if step.anchor is not None:
            rebuilt.append(step.anchor)
        assert step.used is None or step.used == step.accepted + 1
        assert step.mask_rows == step.block * len(step.proposals)
    assert rebuilt == answer.tokens
    assert [step.step for step in answer.steps] == list(range(len(answer.steps)))
    assert answer.steps[0].drafted == ()


@pytest.mark.parametrize("step_rows", [1, 3, 16])
def test_prefill_chunks_do_not_change_the_answer(tmp_path, engine, step_rows):
    chunked = tiny_engine(tmp_path, step_rows=step_rows)
    chosen = prompts(3, seed=1)
    params = [sampled_params(16, "full")] * 3
    expected = [answer.tokens for answer in answer_all(engine, chosen, params)]
    assert [answer.tokens for answer in answer_all(chunked, chosen, params)] == expected


@pytest.mark.parametrize("scarce", ["max_running", "pages"])
def test_the_urgent_are_served_first_and_take_the_place_of_others(tmp_path, engine, scarce):
    limits = {"max_running": 1} if scarce == "max_running" else {"cache_tokens": 64, "max_model_len": 64}
    small = tiny_engine(tmp_path, **limits)
    asked = {"patient": 5, "common": 0, "urgent": -1, "common too": 0}
    params = replace(GREEDY, max_tokens=40)
    questions = dict(zip(asked, prompts(4, seed=3, longest=20), strict=True))
    ended = []

    said = {name: [] for name in asked}
    for name, priority in asked.items():
        small.submit(Request(name, questions[name], params, priority=priority))
        for _ in range(3):
            for output in small.step():
                said[output.request_id] += output.tokens
    while small.has_work:
        for output in small.step():
            said[output.request_id] += output.tokens
            if output.finish is not None:
                ended.append(output.request_id)
    assert ended[-1] == "patient"
    if scarce == "max_running":
        assert ended == ["urgent", "common", "common too", "patient"]
    alone = answer_all(engine, list(questions.values()), [params] * 4)
    assert list(said.values()) == [answer.tokens for answer in alone]


def test_an_urgent_prompt_does_not_wait_for_a_long_one(tmp_path):
    small = tiny_engine(tmp_path, step_rows=16)
    small.submit(Request("long", tuple(range(3, 120)), replace(GREEDY, max_tokens=4), priority=1))
    assert small.step() == []
    small.submit(Request("urgent", (5, 6, 7), replace(GREEDY, max_tokens=4)))
    assert [output.request_id for output in small.step()] == ["urgent"]


def test_who_waited_elsewhere_already_is_before_who_just_came(tmp_path):
    small = tiny_engine(tmp_path, max_running=1)
    asked = {"first": (0, 0.0), "new": (0, 0.0), "moved": (0, 0.5), "moved twice": (0, 7.0), "patient": (1, 60.0)}
    for name, (priority, waited) in asked.items():
        small.submit(Request(name, (5, 6, 7), replace(GREEDY, max_tokens=4), priority=priority, waited=waited))
        if name == "first":
            small.step()
    ended = []
    while small.has_work:
        ended += [output.request_id for output in small.step() if output.finish is not None]
    assert ended == ["first", "moved twice", "moved", "new", "patient"]


def test_preemption_and_admission_do_not_change_the_answer(tmp_path, engine):
    """Twelve pages for eight sequences that want up to six each: they take turns."""
    small = tiny_engine(tmp_path, cache_tokens=12 * 16, max_model_len=96)
    chosen = prompts(8, seed=2, longest=50)
    params = [sampled_params(40, mode) for mode in ("off", "auto", "full", "full") * 2]
    expected = [
        answer_all(engine, [prompt], [chosen_])[0].tokens for prompt, chosen_ in zip(chosen, params, strict=True)
    ]
    for index, (prompt, chosen_) in enumerate(zip(chosen, params, strict=True)):
        small.submit(Request(str(index), prompt, chosen_))
    got: dict[str, list[int]] = {}
    preempted, begun = 0, []
    while small.has_work:
        before = {s.request.request_id for s in small._scheduler.waiting}
        for output in small.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
        assert pages_are_accounted_for(small)
        begun += [request_id for request_id, _ in small.stats().begun]
        back = {s.request.request_id for s in small._scheduler.waiting if s.cached is not None}
        preempted += len(back - before)
    assert small.stats().preemptions >= preempted > 0
    assert engine.stats().preemptions == 0
    assert sorted(begun) == [str(index) for index in range(8)], "once, however often they came back"
    assert [got[str(index)] for index in range(8)] == expected


def test_random_traffic_leaks_nothing_and_changes_no_token(engine):
    """Requests come and go at random; whoever finishes has the tokens of a lonely run."""
    draw = random.Random(7)
    chosen = prompts(24, seed=3)
    params = [sampled_params(draw.randint(1, 30), draw.choice(("off", "auto", "full"))) for _ in chosen]
    expected = [
        answer_all(engine, [p], [replace(q, drafts="off")])[0].tokens for p, q in zip(chosen, params, strict=True)
    ]
    waiting, tokens, aborted = list(range(24)), {i: [] for i in range(24)}, set()
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.4:
            index = waiting.pop()
            engine.submit(Request(str(index), chosen[index], params[index]))
        if draw.random() < 0.05:
            engine.abort(str(draw.randrange(24)))
        for output in engine.step():
            tokens[int(output.request_id)] += output.tokens
            if output.finish is not None and output.finish.reason is FinishReason.ABORT:
                aborted.add(int(output.request_id))
        assert pages_are_accounted_for(engine)
    assert engine.stats().pages_used == 0
    for index in range(24):
        length = len(tokens[index]) if index in aborted else len(expected[index])
        assert tokens[index] == expected[index][:length]
    assert len(aborted) < 24


def test_a_handed_over_request_goes_on_where_it_was(engine):
    (prompt,) = prompts(1, seed=4)
    params = sampled_params(30, "full")
    whole = answer_all(engine, [prompt], [params])[0].tokens
    for already in (1, 7, 29):
        engine.submit(Request("second", prompt, params, emitted=tuple(whole[:already])))
        rest = []
        while engine.has_work:
            rest += [token for output in engine.step() for token in output.tokens]
        assert whole[:already] + rest == whole


def test_stops_cut_an_accepted_run(engine):
    (prompt,) = prompts(1, seed=6)
    whole = answer_all(engine, [prompt], [replace(GREEDY, max_tokens=60)])[0].tokens
    text = engine.tokenizer.decode(whole)
    stop_id = whole[20]
    cut = whole[: whole.index(stop_id) + 1]
    stop_text = text[len(text) // 3 : len(text) // 3 + 3]
    for mode in ("off", "full"):
        params = replace(GREEDY, max_tokens=60, drafts=mode)
        (answer,) = answer_all(engine, [prompt], [replace(params, stop_token_ids=frozenset({stop_id}))])
        assert answer.tokens == cut
        assert answer.finish.reason is FinishReason.STOP
        assert answer.finish.stop == stop_id
        both = replace(params, stop_token_ids=frozenset({stop_id}), stop=(engine.tokenizer.decode(cut),))
        (answer,) = answer_all(engine, [prompt], [both])
        assert (answer.tokens, answer.finish.stop) == (cut, stop_id), "its text is not in the answer, nor searched"
        (answer,) = answer_all(engine, [prompt], [replace(params, stop=(stop_text,))])
        assert answer.finish.stop == stop_text
        kept = engine.tokenizer.decode(answer.tokens)
        assert stop_text in kept
        assert stop_text not in engine.tokenizer.decode(answer.tokens[:-1])


def test_min_tokens_puts_the_end_off(engine):
    (prompt,) = prompts(1, seed=6)
    whole = answer_all(engine, [prompt], [replace(GREEDY, max_tokens=60)])[0].tokens
    stops = frozenset(whole[:5])
    lengths = set()
    for mode in ("off", "full"):
        params = replace(GREEDY, max_tokens=60, min_tokens=12, stop_token_ids=stops, drafts=mode)
        (answer,) = answer_all(engine, [prompt], [params])
        assert len(answer.tokens) > 12
        assert not stops & set(answer.tokens[:12])
        lengths.add(tuple(answer.tokens))
    assert len(lengths) == 1


def test_min_tokens_puts_stop_strings_off(engine):
    (prompt,) = prompts(1, seed=6)
    whole = answer_all(engine, [prompt], [replace(GREEDY, max_tokens=60)])[0].tokens
    text = engine.tokenizer.decode(whole)
    stop = next(text[i : i + 2] for i in range(len(text)) if text.count(text[i : i + 2]) > 2)
    ends = [n for n in range(1, 61) if stop in engine.tokenizer.decode(whole[max(0, n - 2) : n])]
    for mode in ("off", "full"):
        for min_tokens in (ends[0] - 1, ends[0], ends[-1] - 1, ends[-1]):
            params = replace(GREEDY, max_tokens=60, stop=(stop,), min_tokens=min_tokens, drafts=mode)
            (answer,) = answer_all(engine, [prompt], [params])
            shown = TextStream(engine.tokenizer, (stop,), min_tokens=min_tokens)
            assert shown.push(whole).used == len(answer.tokens) > min_tokens
            assert answer.tokens == whole[: len(answer.tokens)]
            stopped = answer.finish.reason is FinishReason.STOP
            assert stopped == (shown.push(()).stop == stop)
        assert stopped == any(n > ends[-1] for n in ends)


def test_scores_that_are_no_numbers_end_their_own_request_alone(tmp_path):
    """A token whose embedding is poisoned, in a prompt and beside others; then its pages are used again."""
    model = tiny_checkpoint(tmp_path / "poisoned", tied=False)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][400] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = EngineConfig(
        model=str(model), adapter="none", dtype="float32", device="cpu", cache_tokens=16 * 16, max_model_len=64
    )
    for step_rows in (5, 512):
        poisoned = load_engine(replace(config, step_rows=step_rows))
        chosen = [tuple(token for token in prompt if token != 400) for prompt in prompts(3, seed=14, longest=30)]
        bad = (*range(3, 30), 400, *range(30, 35))
        params = sampled_params(24, "off")
        expected = [answer_all(poisoned, [prompt], [params])[0].tokens for prompt in chosen]
        for round in range(2):
            answers = answer_all(poisoned, [bad, *chosen, bad], [params] * 5, f"{step_rows} {round}")
            assert [answer.tokens for answer in answers[1:4]] == expected
            for answer in (answers[0], answers[4]):
                assert answer.tokens == []
                assert answer.finish.reason is FinishReason.ERROR
                assert "not numbers" in answer.finish.error
        assert poisoned.stats().pages_used == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 4, "empty"),
        ((5, 512), 4, "between 0 and 511"),
        ((5, -1), 4, "between 0 and 511"),
        ((5,) * 1020, 5, "exceed the 1024 positions"),
    ],
)
def test_requests_that_can_never_run_are_refused(engine, prompt, max_tokens, message):
    with pytest.raises(RequestError, match=message):
        engine.submit(Request("bad", prompt, SamplingParams(max_tokens=max_tokens)))
    assert not engine.has_work


def test_a_word_that_the_model_has_no_embedding_for_is_named(tmp_path):
    """A tokenizer may have been given more words than the model has rows; who sends text knows no ids."""
    path = tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(path)
    engine = load_engine(EngineConfig(str(path), "none", "float32", "cpu", 1))
    prompt = tuple(tokenizer("say <|new|>").input_ids)
    with pytest.raises(RequestError, match=r"token 512 \('<\|new\|>'\) is none that the model has an embedding for"):
        engine.submit(Request("a", prompt, SamplingParams(max_tokens=4)))


def test_an_answer_may_end_with_the_positions_of_the_engine(engine):
    """As where another replica has more of them: what was asked for by its measure is not refused."""
    params = replace(GREEDY, max_tokens=50, ignore_eos=True)
    prompt = (5, 6, 7) * 340
    engine.submit(Request("cut", prompt, params, cut=True))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(output.tokens) for output in outputs) == 1024 - len(prompt)
    assert outputs[-1].finish == Finish(FinishReason.LENGTH)
    for known in (prompt + (5,) * 4, prompt + (5,) * 9):
        with pytest.raises(RequestError, match="exceed the 1024 positions"):
            engine.submit(Request("none", known, params, cut=True))
    with pytest.raises(RequestError, match="all that the 1024 positions of this engine hold was emitted already"):
        engine.submit(Request("full", prompt, params, emitted=(5,) * 4, cut=True))
    with pytest.raises(RequestError, match="all of max_tokens was emitted already"):
        engine.submit(Request("over", (5, 6, 7), params, emitted=(5,) * 50, cut=True))


def test_abort_is_idempotent_and_ends_with_one_output(engine):
    engine.submit(Request("gone", (5, 6, 7), GREEDY))
    engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never there")
    outputs = engine.step()
    assert [(o.request_id, o.finish.reason) for o in outputs] == [("gone", FinishReason.ABORT)]
    assert not engine.has_work
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_look_at_drafts_ahead_and_change_no_token_by_drafting(engine, temperature):
    params = replace(
        sampled_params(48, "off"), temperature=temperature, presence_penalty=0.4, frequency_penalty=0.3,
        repetition_penalty=1.2, logit_bias=((300, 3.0), (301, -100.0)),
    )  # fmt: skip
    ways = decode_ways(engine, prompts(4, seed=9), lambda mode: replace(params, drafts=mode), 4)
    assert all(comparison.different == 0 for comparison in compare_ways(ways))
    plain = replace(params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    without = [answer.tokens for answer in answer_all(engine, prompts(4, seed=9), [plain] * 4)]
    assert without != ways["off, alone"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_are_trusted_have_a_say(engine, temperature):
    """The paper's two ends, and what lies between."""
    chosen = prompts(6, seed=21)

    def said(trust: float) -> list[EngineAnswer]:
        params = SamplingParams(40, temperature, seed=5, ignore_eos=True, drafts="full", draft_trust=trust, logprobs=0)
        return answer_all(engine, chosen, [params] * len(chosen), cache_salt=str(trust))

    plain, nearly, half, drafter = (said(trust) for trust in (1.0, 1.0 - 1e-9, 0.5, 0.0))
    assert [answer.tokens for answer in nearly] == [answer.tokens for answer in plain]
    held = [[sum(step.accepted for step in answer.steps) for answer in answers] for answers in (plain, half, drafter)]
    assert sum(held[0]) < sum(held[1]) < sum(held[2])
    steps = [step for answer in drafter for step in answer.steps]
    assert all(step.accepted == len(step.drafted) for step in steps[:-1] if step.anchor is not None)
    assert [answer.tokens for answer in half] != [answer.tokens for answer in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_alone_never_says_its_own_mask(tmp_path, temperature):
    model = tiny_checkpoint(tmp_path / "model")
    (model / CONTRACT_FILE).write_text(OwnDrafter(mask_token_id=400, block_length=4).model_dump_json())
    engine = load_engine(EngineConfig(str(model), dtype="float32", device="cpu"))
    params = SamplingParams(20, temperature, ignore_eos=True, drafts="full", draft_trust=0.0)
    (answer,) = answer_all(engine, [(5, 6, 7)], [params])
    assert (len(answer.tokens), answer.finish.reason) == (20, FinishReason.LENGTH)
    assert 400 not in answer.tokens


def test_trust_needs_drafts(tmp_path):
    plain = tiny_engine(tmp_path, adapter="none")
    with pytest.raises(RequestError, match="no drafter"):
        plain.submit(Request("r", (5,), SamplingParams(4, draft_trust=0.5)))
    with pytest.raises(RequestError, match="needs drafts"):
        SamplingParams(4, drafts="off", draft_trust=0.5)
    with pytest.raises(RequestError, match="blocks of 1 have none"):
        SamplingParams(4, block=1, draft_trust=0.5)


def test_a_drafter_gone_mad_changes_no_token(engine):
    params = [sampled_params(24, "full")] * 3
    expected = [answer.tokens for answer in answer_all(engine, prompts(3, seed=11), params)]
    sound = engine._runner
    assert sound.adapter is not None
    mad = replace(sound.adapter, slot_embeddings=torch.full_like(sound.adapter.slot_embeddings, torch.nan))
    try:
        for ops in (sound.ops, replace(sound.ops, name="torch", attend=REFERENCE_OPS.attend)):
            engine._runner = replace(sound, adapter=mad, ops=ops)
            answers = answer_all(engine, prompts(3, seed=11), params, cache_salt=ops.name)
            if ops is sound.ops:
                assert [answer.tokens for answer in answers] == expected
            assert all(answer.finish.reason is FinishReason.LENGTH for answer in answers)
            assert all(token >= 0 for answer in answers for step in answer.steps for token in step.drafted)
    finally:
        engine._runner = sound


def test_a_name_is_used_once_at_a_time(engine):
    engine.submit(Request("twin", (5, 6), GREEDY))
    with pytest.raises(RequestError, match="twin is under way"):
        engine.submit(Request("twin", (7, 8), GREEDY))
    engine.abort("twin")
    engine.submit(Request("twin", (7, 8), GREEDY))
    engine.abort("twin")
    assert [output.finish.reason for output in engine.step()] == [FinishReason.ABORT] * 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("r", (5,), SamplingParams(4, logit_bias=((512, 1.0),))), "logit_bias"),
        (Request("r", (5,), SamplingParams(4, allowed_token_ids=(5, 512))), "allowed_token_ids: ids must lie between"),
        (Request("r", (5,), SamplingParams(4, allowed_token_ids=(2,), min_tokens=1)), "no token that an answer could"),
        (Request("r", (5,), SamplingParams(4, bad_words=((7, 512),))), "bad_words: ids must lie between"),
        (Request("r", (5,), SamplingParams(4), emitted=(512,)), "between 0 and 511"),
        (Request("r", (5,), SamplingParams(2), emitted=(6, 7)), "emitted already"),
    ],
)
def test_what_an_engine_could_not_compute_is_refused(engine, request_, message):
    with pytest.raises(RequestError, match=message):
        engine.submit(request_)
    assert not engine.has_work
