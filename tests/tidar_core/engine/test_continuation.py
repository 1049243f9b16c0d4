"""A request sent on as prompt + emitted tokens goes on exactly as if nothing had happened, wherever it is cut."""

from dataclasses import dataclass, field, replace

import pytest

from tests.tidar_core.engines import pages_are_accounted_for, prompts, tiny_engine
from tidar_core.engine import Engine
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, TokenLogprobs

SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, top_k=60, seed=77, ignore_eos=True)
PENALISED = replace(SAMPLED, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2)
KINDS = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": SAMPLED,
    "another choice": replace(SAMPLED, choice=2),
    "penalties": replace(PENALISED, logit_bias=((300, 3.0), (301, -100.0))),
    "bad words": replace(SAMPLED, bad_words=(*((token,) for token in range(256, 400)), *((a, a) for a in range(256)))),
    "log-probabilities": replace(PENALISED, logprobs=3),
}


@dataclass
class Part:
    """What an engine said from some point on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    made = tiny_engine(tmp_path_factory.mktemp("continued"), dtype="bfloat16")
    assert made.info.exact
    return made


def run(engine: Engine, requests: list[Request]) -> list[Part]:
    """What is said to each request, all of them in one batch."""
    parts = {request.request_id: Part() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            part = parts[output.request_id]
            part.tokens += output.tokens
            part.logprobs += output.logprobs
            part.finish = output.finish
    assert pages_are_accounted_for(engine)
    return list(parts.values())


def check_every_cut(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Part:
    """Cut the answer behind each of its tokens; gives the whole of it."""
    (whole,) = run(engine, [Request("whole", prompt, params, cache_salt="whole")])
    assert whole.finish is not None
    cuts = range(1, len(whole.tokens))
    for drafts in ("off", "full"):
        asked = replace(params, drafts=drafts)
        parts = run(engine, [Request(str(cut), prompt, asked, emitted=tuple(whole.tokens[:cut])) for cut in cuts])
        for cut, part in zip(cuts, parts, strict=True):
            assert part.tokens == whole.tokens[cut:], (drafts, cut)
            assert part.finish == whole.finish, (drafts, cut)
            assert part.logprobs == whole.logprobs[cut:], (drafts, cut)
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_every_token(engine: Engine, kind: str) -> None:
    (prompt,) = prompts(1, seed=20)
    params = KINDS[kind]
    whole = check_every_cut(engine, prompt, params)
    assert whole.finish == Finish(FinishReason.LENGTH)
    assert len(whole.tokens) == params.max_tokens
    assert len(whole.logprobs) == (len(whole.tokens) if params.logprobs else 0)


def test_min_tokens_counts_from_the_prompt(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=21)
    (free,) = run(engine, [Request("free", prompt, SAMPLED)])
    params = replace(SAMPLED, min_tokens=10, stop_token_ids=frozenset(free.tokens[:8]))
    whole = check_every_cut(engine, prompt, params)
    assert not params.stop_token_ids & set(whole.tokens[:10])


def test_a_stop_string_may_lie_across_the_cut(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=22)
    (free,) = run(engine, [Request("free", prompt, SAMPLED)])
    text = engine.tokenizer.decode(free.tokens)
    place = len(text) // 2
    while text.find(text[place : place + 6]) < place:
        place += 1
    params = replace(SAMPLED, stop=(text[place : place + 6], "never said"))
    whole = check_every_cut(engine, prompt, params)
    assert whole.finish == Finish(FinishReason.STOP, params.stop[0])
    assert 1 < len(whole.tokens) < len(free.tokens)
