"""Thoughts that a request limits: as long as it says and no longer, whatever is drafted, in whatever company."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tidar_core.engines import pages_are_accounted_for
from tests.tiny import thinking_tokenizer, tiny_adapter, tiny_checkpoint, tiny_tokenizer
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine
from tidar_core.engine.constraint import ANY_NUMBER, only_token
from tidar_core.engine.thought_watch import ThoughtWatch
from tidar_core.grammar.grammar import tag_grammar
from tidar_core.request import Request, RequestError, SamplingParams, ThoughtLimit

VOCAB = 512
BEGUN = ThoughtLimit("<think>", "</think>", begun=True, tokens=7)
ONE_TOKEN, SEVERAL = thinking_tokenizer(VOCAB), tiny_tokenizer(VOCAB)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [ONE_TOKEN, SEVERAL], ids=["tags of one token", "of several"])


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def only(token: int | None) -> np.ndarray | None:
    if token is None:
        return None
    alone = np.zeros(VOCAB // 8, np.uint8)
    alone[token // 8] = 1 << token % 8
    return alone


def wanted(tokenizer: PreTrainedTokenizerFast, limit: ThoughtLimit, tokens: list[int]) -> int | None:
    """The one token that may follow, by the whole text so far."""
    end, texts = tuple(ids(tokenizer, limit.end)), [tokenizer.decode([token]) for token in tokens]
    start, thoughts = 0, "".join(texts)
    if not limit.begun:
        fronts = ("".join(texts[:count]).lstrip() for count in range(len(texts) + 1))
        started = next((count for count, front in enumerate(fronts) if not limit.begin.startswith(front)), None)
        started = next(
            (n for n in range(len(texts) + 1) if "".join(texts[:n]).lstrip().startswith(limit.begin)), started
        )
        if started is None or not "".join(texts[:started]).lstrip().startswith(limit.begin):
            return None
        start, thoughts = started, "".join(texts).lstrip().removeprefix(limit.begin)
    said = tuple(tokens[start:])
    if limit.end in thoughts or len(said) < limit.tokens:
        return None
    for count in range(limit.tokens, len(said) + 1):
        begun = next(n for n in range(len(end) - 1, -1, -1) if said[max(0, count - n) : count] == end[:n])
        if count == len(said):
            return end[begun]
        if said[count] != end[begun]:
            return None  # where that is not allowed there is none to wait for
    return None


@TOKENIZERS
@given(data=st.data())
def test_the_end_is_all_that_may_come_where_thoughts_are_long_enough(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    texts = ["<think>", "</think>", "a", " b", "\n", "</", "<", "think>", ">", "</thin", "ünd", "a sentence of some"]
    said = data.draw(st.lists(st.sampled_from(texts), max_size=12))
    limit = ThoughtLimit("<think>", "</think>", data.draw(st.booleans()), data.draw(st.integers(0, 6)))
    tokens = [token for text in said for token in ids(tokenizer, text)]
    watch, ahead = (ThoughtWatch(limit, tokenizer, VOCAB, with_special=False) for _ in range(2))
    expected = []
    for count in range(len(tokens) + 1):
        expected.append(only(wanted(tokenizer, limit, tokens[:count])))
        np.testing.assert_equal(watch.mask(), expected[-1])
        assert watch.free == 0 or expected[-1] is None
        if count < len(tokens):
            assert watch.advance(tokens[count : count + 1]) == 1
    followed = next(
        (n for n, mask in enumerate(expected) if mask is not None and tokens[n : n + 1] != [only_token(mask)]),
        len(tokens),
    )
    masks = ahead.masks(tokens)
    np.testing.assert_equal(masks[: followed + 1], expected[: followed + 1])
    kept = 0
    while kept < len(tokens) and ahead.guess(tokens[kept]):
        kept += 1
        np.testing.assert_equal(ahead.mask(), expected[kept])
    assert kept == followed
    ahead.forget(kept)
    np.testing.assert_equal(ahead.mask(), expected[0])


@TOKENIZERS
def test_nothing_is_asked_any_more_behind_thoughts(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("so</think>", "Well"):
        watch = ThoughtWatch(replace(BEGUN, begun=text != "Well"), tokenizer, VOCAB, with_special=False)
        assert watch.free == 7
        watch.advance(ids(tokenizer, text))
        assert watch.free == ANY_NUMBER


def test_special_tokens_are_text_where_they_are_told() -> None:
    for with_special in (False, True):
        watch = ThoughtWatch(replace(BEGUN, begun=False, tokens=1), ONE_TOKEN, VOCAB, with_special)
        watch.advance([2, *ids(ONE_TOKEN, "<think>a")])
        assert (watch.mask() is None) == with_special


def test_an_end_that_has_begun_is_brought_to_its_end() -> None:
    end = ids(SEVERAL, "</think>")
    for count in range(1, len(end)):
        watch = ThoughtWatch(replace(BEGUN, tokens=count + 1), SEVERAL, VOCAB, with_special=False)
        watch.advance([*ids(SEVERAL, "a"), *end[:count]])
        np.testing.assert_equal(watch.mask(), only(end[count]))


def test_words_of_sentencepiece_are_told_from_tags() -> None:
    """Alone, such a token has no space in front."""
    backend = Tokenizer(models.BPE({"</": 0, "\u2581think": 1, ">": 2, "a": 3, "t": 4}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["</think>"])
    watch = ThoughtWatch(replace(BEGUN, tokens=3), tokenizer, VOCAB, with_special=False)
    watch.advance([0, 1, 2])
    np.testing.assert_equal(watch.mask(), only(5))


def test_a_model_without_tokens_for_the_end_is_told_so() -> None:
    with pytest.raises(RequestError, match="no tokens for the end"):
        ThoughtWatch(BEGUN, ONE_TOKEN, VOCAB - 1, with_special=False)


@pytest.fixture(scope="module", params=[ONE_TOKEN, SEVERAL], ids=["tags of one token", "of several"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("thoughts")
    model = tiny_checkpoint(directory / "model", vocab=VOCAB)
    request.param.save_pretrained(model)
    adapter = tiny_adapter(directory / "adapter", model)
    return EngineConfig(str(model), str(adapter), "float32", "cpu")


PROMPTS = [(5, 6, 7), (300, 20, 41, 9), (77,), (8, 8, 8)]


def asked(**fields: Any) -> list[SamplingParams]:
    """By several limits, and without one."""
    common = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True} | fields
    limits = [BEGUN, replace(BEGUN, tokens=0), replace(BEGUN, tokens=25), None]
    return [SamplingParams(thought_limit=limit, **common) for limit in limits]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"frequency_penalty": 0.5, "min_tokens": 60},
        {"logit_bias": ((2, 100.0),)},  # the end of sequence, which is ignored
    ],
)
def test_thoughts_end_there_whatever_is_drafted_and_in_any_company(
    config: EngineConfig, fields: dict[str, Any]
) -> None:
    engine = load_engine(config)
    end = ids(engine.tokenizer, "</think>")
    plain = [
        answer_all(engine, [p], [one])[0].tokens for p, one in zip(PROMPTS, asked(drafts="off", **fields), strict=True)
    ]
    for tokens, limit in zip(plain, (7, 0, 25), strict=False):
        assert tokens[limit : limit + len(end)] == end
        assert len(tokens) == 60
    assert end[0] not in plain[3] or len(end) > 1
    for settings in ({}, {"overlap_steps": True}):
        other = load_engine(replace(config, **settings))
        for drafts in ("off", "auto", "full"):
            found = answer_all(other, PROMPTS, asked(drafts=drafts, **fields))
            assert [answer.tokens for answer in found] == plain
            steps = [step for answer in found[:3] for step in answer.steps]
            assert drafts != "full" or sum(step.accepted for step in steps) > 0
        assert pages_are_accounted_for(other)


def test_steps_fly_but_where_thoughts_might_have_to_end(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(replace(config, overlap_steps=True))
    overlapped: list[int] = []
    launch = engine._launch
    monkeypatch.setattr(
        engine, "_launch", lambda plans, behind=None: (behind and overlapped.append(1), launch(plans, behind))[1]
    )
    (answer,) = answer_all(
        engine,
        PROMPTS[:1],
        [replace(asked()[0], thought_limit=replace(BEGUN, tokens=40), drafts="off", max_tokens=100)],
    )
    assert answer.tokens[40] == ids(engine.tokenizer, "</think>")[0]
    assert 60 < len(overlapped) < 95, "some steps around the end wait for the one before"


def test_an_answer_goes_on_at_another_replica_from_wherever_it_was_cut(config: EngineConfig) -> None:
    engine = load_engine(config)
    params = asked(drafts="full")[0]
    (whole,) = answer_all(engine, PROMPTS[:1], [params])
    for cut in range(1, 20):
        engine.submit(Request(f"r{cut}", PROMPTS[0], params, emitted=tuple(whole.tokens[:cut])))
        rest = []
        while engine.has_work:
            rest += [token for output in engine.step() for token in output.tokens]
        assert [*whole.tokens[:cut], *rest] == whole.tokens


@pytest.mark.parametrize("drafts", ["off", "full"])
def test_what_an_answer_has_to_follow_besides_comes_behind_its_thoughts(config: EngineConfig, drafts: Any) -> None:
    engine = load_engine(config)
    thought = {"type": "any_text", "excludes": ["</think>"]}
    form = {
        "type": "sequence",
        "elements": [thought, {"type": "const_string", "value": "</think>"}, {"type": "regex", "pattern": "[A-Z]{3}"}],
    }
    never = {"type": "const_string", "value": 10 * "ÿ"}  # two tokens each, in one way
    limited = replace(asked(drafts=drafts)[0], grammar=tag_grammar(form))
    held = replace(limited, grammar=tag_grammar(never))
    first, second = answer_all(engine, PROMPTS[:2], [limited, held])
    end = ids(engine.tokenizer, "</think>")
    assert first.tokens[7 : 7 + len(end)] == end
    assert engine.tokenizer.decode(first.tokens[7 + len(end) :], skip_special_tokens=True).isupper()
    assert len(second.tokens) == 20 + 1, "a grammar without that end goes before"
    assert drafts == "off" or len(second.steps) < 10, "what it allows is drafted there"


def test_allowed_tokens_and_a_limit_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="thinking_token_budget: leave one"):
        SamplingParams(5, allowed_token_ids=(1,), thought_limit=BEGUN)
