"""Gathering own words: both generators, the user's prompts among them, limits of time and number, kills."""

import itertools
import json
import time
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from tests.tidar_core.convert.documents import HEADER, document
from tests.tiny import tiny_checkpoint, tiny_tokenizer
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert import own_words, sources
from tidar_core.convert.conversations import LEAST_OWN_TOKENS, DocumentPlan
from tidar_core.convert.growing import GROWING_FILE, Growing, read_growing, write_growing
from tidar_core.convert.own_words import Goal, SortedPrompts, add_text, gather_own_words, sort_prompts, unanswered
from tidar_core.convert.shards import KINDS, open_store
from tidar_core.convert.sources import Completion, EngineSource, TransformersSource
from tidar_core.engine import load_engine
from tidar_core.request import SamplingParams

SHORT = DocumentPlan(seed=0, chat=True, question_tokens=24, answer_tokens=32, longest=512)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", likely=0)


@pytest.fixture(scope="module")
def engine(model_directory):
    return load_engine(EngineConfig(model=str(model_directory), dtype="float32", device="cpu", threads=1))


def engine_source(engine, capacity: int = 8) -> EngineSource:
    return EngineSource(engine, capacity)


class Killed(Exception):
    pass


def kill_after(steps: int):
    """To be called at each step of a run."""
    left = itertools.repeat(None, steps)

    def step(_) -> None:
        if next(left, Killed) is Killed:
            raise Killed

    return step


def forget_all(engine) -> None:
    """What was on its way is lost, as with the process."""
    while engine.has_work:
        engine.step()


def documents(store) -> dict[int, list[int]]:
    corpus = store.read().corpus
    return {int(job): corpus.document(index)[0].tolist() for index, job in enumerate(corpus.jobs)}


class Noting(EngineSource):
    """Keeps what each submission begins with."""

    def __init__(self, engine, capacity: int):
        super().__init__(engine, capacity)
        self.beginnings: list[tuple[int, ...]] = []

    def submit(self, key, prompt, params, so_far=()):
        self.beginnings.append(so_far)
        return super().submit(key, prompt, params, so_far)


def test_what_was_on_its_way_goes_on_after_a_kill(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(own_words, "FLUSH_SECONDS", 0.0)
    whole, killed = open_store(tmp_path / "whole", HEADER), open_store(tmp_path / "killed", HEADER)
    gather_own_words(engine_source(engine), engine.tokenizer, SHORT, whole, Goal(own_tokens=600))
    for step in range(3):
        kept = [growing.so_far for growing in read_growing(killed.directory)]
        source = Noting(engine, 8)
        with pytest.raises(Killed):
            gather_own_words(
                source, engine.tokenizer, SHORT, killed, Goal(own_tokens=600), progress=kill_after(8 + step)
            )
        forget_all(engine)
        assert set(kept) <= set(source.beginnings)
        assert len(kept) == 10 * (step > 0)
    assert killed.read().seconds > 0
    source = Noting(engine, 8)
    gather_own_words(source, engine.tokenizer, SHORT, killed, Goal(own_tokens=600))
    assert sum(map(bool, source.beginnings)) > 5
    assert read_growing(killed.directory) == []
    expected, found = documents(whole), documents(killed)
    assert len(expected.keys() & found.keys()) > 10
    assert all(found[job] == expected[job] for job in expected.keys() & found.keys())


@pytest.mark.parametrize("generates", [True, False])
def test_what_a_kill_near_the_end_left_is_learnt_from(engine, tmp_path, monkeypatch, generates):
    """The time of the goal is used up: the next run has none to go on in. A slow machine may not have one whole."""
    monkeypatch.setattr(own_words, "FLUSH_SECONDS", 0.0)
    long, killed = replace(SHORT, answer_tokens=400), open_store(tmp_path, HEADER)
    with pytest.raises(Killed):
        gather_own_words(
            engine_source(engine), engine.tokenizer, long, killed, Goal(seconds=3600.0), progress=kill_after(120)
        )
    forget_all(engine)
    left, before = read_growing(killed.directory), documents(killed)
    assert {kept.number for kept in left} - killed.read().done
    source = Noting(engine, 8)
    if generates:
        gather_own_words(source, engine.tokenizer, long, killed, Goal(seconds=1e-3))
    else:
        own_words.cut_growing(engine.tokenizer, long, killed)
    assert source.beginnings == [], "nothing more is generated"
    assert {kept.number for kept in left} <= killed.read().done
    assert read_growing(killed.directory) == []
    new = documents(killed).keys() - before.keys()
    assert new
    assert new <= {kept.number for kept in left}


def test_a_prompt_on_its_way_goes_on_after_a_kill(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(own_words, "FLUSH_SECONDS", 0.0)
    prompts = [f"What is the answer to {number}?" for number in range(4)]
    store = open_store(tmp_path, HEADER)
    with pytest.raises(Killed):
        gather_own_words(
            engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=1), prompts, kill_after(12)
        )
    forget_all(engine)
    assert [kept.prompt for kept in read_growing(tmp_path) if kept.prompt] == prompts
    source = Noting(engine, 8)
    gather_own_words(source, engine.tokenizer, SHORT, store, Goal(own_tokens=1), prompts)
    assert all(source.beginnings[:4])
    assert unanswered(engine.tokenizer, prompts, store.read()) == []
    assert not any(kept.prompt for kept in read_growing(tmp_path))


def test_what_cannot_be_taken_up_begins_anew(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(own_words, "FLUSH_SECONDS", 0.0)
    store = open_store(tmp_path, HEADER)
    with pytest.raises(Killed):
        gather_own_words(
            engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=600), progress=kill_after(20)
        )
    forget_all(engine)
    shorter = replace(SHORT, question_tokens=4, answer_tokens=10)
    gather_own_words(engine_source(engine), engine.tokenizer, shorter, store, Goal(own_tokens=100))
    assert max(len(tokens) for tokens in documents(store).values()) > 0
    (tmp_path / GROWING_FILE).write_text('{"conversations": [{"number"')
    gather_own_words(engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=400))
    jobs = store.read().corpus.jobs.tolist()
    assert len(jobs) == len(set(jobs)) > 10


def test_conversations_on_their_way_have_the_same_names_on_disk_in_all_versions(tmp_path):
    write_growing(tmp_path, [Growing(number=3, prompt="", heard=(), said=(1, 2))])
    kept = {"number": 3, "prompt": "", "heard": [], "said": [1, 2]}
    assert json.loads((tmp_path / GROWING_FILE).read_text()) == {"format": 2, "conversations": [kept]}
    assert [growing.so_far for growing in read_growing(tmp_path)] == [(1, 2)]


def test_gathering_goes_on_where_it_was_killed(engine, tmp_path, monkeypatch):
    tokenizer = engine.tokenizer
    whole = open_store(tmp_path / "whole", HEADER)
    gather_own_words(engine_source(engine), tokenizer, SHORT, whole, Goal(own_tokens=1500))

    killed = open_store(tmp_path / "killed", HEADER)
    monkeypatch.setattr(own_words, "FLUSH_SECONDS", 0.0)
    with pytest.raises(Killed):
        gather_own_words(
            engine_source(engine), tokenizer, SHORT, killed, Goal(own_tokens=1500), progress=kill_after(60)
        )
    forget_all(engine)
    before = killed.read()
    assert 0 < before.corpus.generated_tokens() < 1500
    gather_own_words(engine_source(engine), tokenizer, SHORT, killed, Goal(own_tokens=1500))
    after = killed.read()
    assert after.corpus.generated_tokens() >= 1500
    assert before.done < after.done
    jobs = [job for job in after.corpus.jobs.tolist() if job >= 0]
    assert len(jobs) == len(set(jobs))
    assert len(set(after.corpus.keys.tolist())) == len(after.corpus)
    # A job gives the same document, whichever run made it.
    expected, found = documents(whole), documents(killed)
    same = expected.keys() & found.keys()
    assert len(same) > 10
    assert all(found[job] == expected[job] for job in same)


def test_prompts_are_answered_once(engine, tmp_path):
    store = open_store(tmp_path, HEADER)
    prompts = ["What is the answer?", "Why do dogs mind?", "What is the answer?"]
    for _ in range(2):
        gather_own_words(engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=200), prompts)
    kinds = store.read().corpus.kinds.tolist()
    assert kinds.count(3) == 2


@pytest.mark.parametrize("goal", [Goal(own_tokens=200), Goal(seconds=60.0)])
def test_prompts_that_come_later_are_answered_though_the_goal_is_reached(engine, tmp_path, goal):
    store = open_store(tmp_path, HEADER)
    gather_own_words(engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=200))
    store.append([], [], 60.0)
    before = store.read()
    prompts = [f"What is the answer to {number}?" for number in range(15)]
    gather_own_words(engine_source(engine, 4), engine.tokenizer, SHORT, store, goal, prompts)
    kinds = store.read().corpus.kinds[len(before.corpus) :].tolist()
    assert kinds == [KINDS.index("prompt")] * len(prompts)
    assert {number for number in store.read().done if number >= 0} == {n for n in before.done if n >= 0}
    assert unanswered(engine.tokenizer, prompts, store.read()) == []


def test_prompts_have_the_time_of_the_goal_in_a_run_and_no_more(engine, tmp_path, monkeypatch):
    store = open_store(tmp_path, HEADER)
    store.append([], [], 500.0)
    now, passed = time.monotonic, itertools.count()
    monkeypatch.setattr(own_words.time, "monotonic", lambda: now() + steps)
    steps = 0

    progress = []

    def a_second_passes(gathered) -> None:
        nonlocal steps
        steps = next(passed)
        progress.append(gathered)

    prompts = [f"What is the answer to {number}?" for number in range(400)]
    source = engine_source(engine, 4)
    gather_own_words(source, engine.tokenizer, SHORT, store, Goal(seconds=100.0), prompts, a_second_passes)
    assert 80 < steps <= 100
    assert {gathered.until for gathered in progress} == {600.0}
    assert [progress[0].asked, progress[-1].asked] == [400, len(unanswered(engine.tokenizer, prompts, store.read()))]
    assert 0 < len(unanswered(engine.tokenizer, prompts, store.read())) < 400
    while engine.has_work:
        engine.step()


def test_prompts_without_a_usable_answer_are_not_asked_again(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(own_words, "HOPELESS", 2)  # which a user's prompts say nothing about

    class Terse(EngineSource):
        def step(self):
            return [Completion(c.key, c.tokens[:2], True) for c in super().step()]

    store = open_store(tmp_path, HEADER)
    store.append([document(0, 400)], [0], 1.0)
    prompts = [f"What is the answer to {number}?" for number in range(4)]
    goal = Goal(own_tokens=200)
    assert gather_own_words(Terse(engine, 8), engine.tokenizer, SHORT, store, goal, prompts).refused == 4
    stored = open_store(tmp_path, HEADER).read()
    assert len(stored.corpus) == 1
    assert unanswered(engine.tokenizer, [*prompts, "Why?"], stored) == ["Why?"]


def test_prompts_that_leave_no_room_for_an_answer_are_asked_where_there_is_some(engine):
    prompts = ["What is the answer? " * 200, "What is the answer?"]
    assert sort_prompts(engine.tokenizer, SHORT, prompts) == SortedPrompts(prompts[1:], 1, 0)
    assert sort_prompts(engine.tokenizer, replace(SHORT, longest=4096), prompts) == SortedPrompts(prompts, 0, 0)


def test_prompts_that_the_template_refuses_are_not_called_long():
    tokenizer = tiny_tokenizer()
    refusal = "{% if 'word' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    assert sort_prompts(tokenizer, SHORT, ["What is a word?", "Why?"]) == SortedPrompts(["Why?"], 0, 1)


def test_given_text_is_not_taken_for_its_own_words(engine, tmp_path):
    (tmp_path / "text").write_text("".join(f"The quick brown fox jumps over {i} lazy dogs.\n" for i in range(200)))
    store = open_store(tmp_path / "data", HEADER)
    add_text(engine.tokenizer, tmp_path / "text", store, 64, 512)
    text = store.read().corpus
    assert text.own.sum() > 1000
    assert text.generated_tokens() == 0
    gathered = gather_own_words(engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=300))
    corpus = store.read().corpus
    assert gathered.own_tokens == corpus.generated_tokens() >= 300
    assert corpus.own.sum() == text.own.sum() + corpus.generated_tokens()


def test_a_model_without_a_template_continues_texts(engine, tmp_path):
    store = open_store(tmp_path, HEADER)
    gather_own_words(engine_source(engine), engine.tokenizer, replace(SHORT, chat=False), store, Goal(own_tokens=300))
    corpus = store.read().corpus
    assert set(corpus.kinds.tolist()) <= {KINDS.index("code"), KINDS.index("text")}
    assert len(corpus) >= 10


def test_gathering_keeps_to_its_time(engine, tmp_path, monkeypatch):
    store, steps, start = open_store(tmp_path, HEADER), [], time.monotonic()
    monkeypatch.setattr(own_words.time, "monotonic", lambda: start + 0.005 * len(steps))
    source = engine_source(engine)
    gathered = gather_own_words(source, engine.tokenizer, SHORT, store, Goal(seconds=1.0), progress=steps.append)
    assert 0.5 < gathered.seconds <= 1.005
    assert gathered.documents == len(store.read().corpus) > 0
    while engine.has_work:
        engine.step()


def test_what_is_on_its_way_when_the_time_is_over_is_learnt_from(engine, tmp_path, monkeypatch):
    """A slow machine ends few documents in its time, and has begun many."""
    prompts = [f"What is the answer to {number}?" for number in range(3)]
    long, steps, now = replace(SHORT, answer_tokens=400), [], time.monotonic
    monkeypatch.setattr(own_words.time, "monotonic", lambda: now() + len(steps))
    whole, cut = open_store(tmp_path / "whole", HEADER), open_store(tmp_path / "cut", HEADER)
    gather_own_words(engine_source(engine), engine.tokenizer, long, whole, Goal(own_tokens=6000), prompts)
    source = engine_source(engine)
    gathered = gather_own_words(source, engine.tokenizer, long, cut, Goal(seconds=150.0), prompts, steps.append)
    forget_all(engine)
    begun, ended = documents(cut), documents(whole)
    shorter = [job for job in begun.keys() & ended.keys() if job >= 0 and len(begun[job]) < len(ended[job])]
    assert shorter
    assert all(begun[job] == ended[job][: len(begun[job])] for job in shorter), "as far as it came, and no further"
    assert gathered.own_tokens == cut.read().corpus.generated_tokens()
    assert min(own for own in (sum(cut.read().corpus.document(i)[1]) for i in range(len(begun)))) >= LEAST_OWN_TOKENS
    unfinished = read_growing(cut.directory)
    assert {kept.number for kept in unfinished}.isdisjoint(begun)
    assert {kept.prompt for kept in unfinished if kept.number < 0} == set(
        unanswered(engine.tokenizer, prompts, cut.read())
    )


def test_a_wide_generator_is_not_judged_by_what_ends_first(engine, tmp_path, monkeypatch):
    """Of all that is generated at once, what comes to nothing may be over before anything good is."""
    monkeypatch.setattr(own_words, "HOPELESS", 8)

    cut_short: set[int] = set()

    class Uneven(EngineSource):
        def step(self):
            ended = super().step()
            cut_short.update(c.key for c in ended if c.key < 10)
            return [replace(c, tokens=c.tokens[:1], ended=True) if c.key < 10 else c for c in ended]

    store = open_store(tmp_path, HEADER)
    gathered = gather_own_words(Uneven(engine, 16), engine.tokenizer, SHORT, store, Goal(own_tokens=200))
    assert len(cut_short) >= 8
    assert cut_short.isdisjoint(documents(store)), "nothing came of them"
    assert gathered.documents > 0
    forget_all(engine)


def test_a_model_that_says_nothing_of_use_is_told(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(own_words, "HOPELESS", 8)

    class Silent(EngineSource):
        def step(self):
            return [Completion(c.key, (2,), True) for c in super().step()]

    with pytest.raises(ConfigError, match="use --text"):
        gather_own_words(Silent(engine, 8), engine.tokenizer, SHORT, open_store(tmp_path, HEADER), Goal(500))
    while engine.has_work:
        engine.step()


class OnlyAnswers(EngineSource):
    """A model that answers the user's prompts, and says nothing by itself."""

    def step(self):
        ended = super().step()
        self.emitted -= sum(len(c.tokens) - 1 for c in ended if c.key)
        return [c if c.key == 0 else Completion(c.key, (2,), True) for c in ended]


@pytest.mark.parametrize("goal", [Goal(own_tokens=10_000), Goal(seconds=500.0)])
def test_a_model_that_only_answers_is_not_asked_for_its_own_words_without_end(engine, tmp_path, monkeypatch, goal):
    monkeypatch.setattr(own_words, "HOPELESS", 8)
    store = open_store(tmp_path, HEADER)
    gathered = gather_own_words(
        OnlyAnswers(engine, 8), engine.tokenizer, SHORT, store, goal, ["What is the answer?"], kill_after(400)
    )
    assert gathered.useless
    assert gathered.documents == len(store.read().corpus) == 1


def test_a_model_that_says_nothing_of_use_learns_from_text_that_it_is_given(engine, tmp_path, monkeypatch):
    class Silent(EngineSource):
        def step(self):
            return [Completion(c.key, (2,), True) for c in super().step()]

    monkeypatch.setattr(own_words, "HOPELESS", 8)
    store, goal = open_store(tmp_path / "data", HEADER), Goal(own_tokens=10_000)
    with pytest.raises(ConfigError, match="use --text FILE"):
        gather_own_words(Silent(engine, 8), engine.tokenizer, SHORT, store, goal, (), kill_after(400))
    (tmp_path / "text").write_text("The quick brown fox jumps over lazy dogs.\n" * 20)
    add_text(engine.tokenizer, tmp_path / "text", store, 128, 512)
    gathered = gather_own_words(Silent(engine, 8), engine.tokenizer, SHORT, store, goal, (), kill_after(400))
    assert gathered.useless
    assert gathered.documents == len(store.read().corpus) > 0


@pytest.mark.parametrize("harm", [{}, {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "min_new_tokens": 9}])
def test_transformers_generates_the_same_greedy_answers(engine, model_directory, harm):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    model.generation_config.update(**harm)  # a checkpoint's own wishes are no part of what its weights say
    other = TransformersSource(model, engine.tokenizer, engine.info.eos_ids, 4, 512)
    ours = engine_source(engine)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    found = []
    for source in (other, ours):
        for key in range(6):
            assert source.submit(key, tuple(range(30 + key, 40 + 3 * key)), params)
        done = {}
        while source.in_flight:
            done |= {c.key: (c.tokens, c.ended) for c in source.step()}
        found.append(done)
    assert found[0] == found[1]
    assert other.emitted == ours.emitted


def test_neither_source_takes_a_token_that_the_model_does_not_have(engine, model_directory):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    for source in (TransformersSource(model, engine.tokenizer, engine.info.eos_ids, 4, 512), engine_source(engine)):
        assert not source.submit(0, (30, 512, 31), SamplingParams(max_tokens=4))
        assert source.in_flight == 0


def test_a_wave_that_lasts_too_long_goes_on_in_another(engine, model_directory, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    params = SamplingParams(max_tokens=20, temperature=0.0)
    found, waves = [], []
    for seconds in (60.0, 0.0):  # no time: a token a wave
        monkeypatch.setattr(sources, "WAVE_SECONDS", seconds)
        source = TransformersSource(model, engine.tokenizer, engine.info.eos_ids, 4, 512)
        for key in range(6):
            assert source.submit(key, tuple(range(30 + key, 40 + 3 * key)), params, so_far=(40,) * (key // 4))
        done, count = {}, 0
        while source.in_flight:
            done |= {c.key: (c.tokens, c.ended) for c in source.step()}
            count += 1
        assert source.emitted == sum(len(tokens) for tokens, _ in done.values())
        found.append(done)
        waves.append(count)
    assert found[0] == found[1]
    assert waves[0] == 2
    assert waves[1] >= 20


def test_transformers_gathers_documents(engine, model_directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    source = TransformersSource(model, engine.tokenizer, engine.info.eos_ids, 8, 512)
    store = open_store(tmp_path, HEADER)
    gathered = gather_own_words(source, engine.tokenizer, SHORT, store, Goal(own_tokens=400))
    assert gathered.own_tokens >= 400
    assert store.read().corpus.own.sum() == gathered.own_tokens
