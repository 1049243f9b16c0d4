"""Log-probabilities of answers and of prompts are the model's own, whatever was drafted or cached."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tidar_core.engines import pages_are_accounted_for, prompts, tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import sampled_params
from tidar_core.request import Request


def test_logprobs_are_the_models_own_and_cover_every_token(tmp_path):
    engine = tiny_engine(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    (prompt,) = prompts(1, seed=10)
    for mode in ("off", "full"):
        params = replace(sampled_params(40, mode), logprobs=3, repetition_penalty=1.3)
        engine.submit(Request("r", prompt, params))
        tokens, entries = [], []
        while engine.has_work:
            for output in engine.step():
                assert len(output.logprobs) == len(output.tokens)
                tokens += output.tokens
                entries += output.logprobs
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for row, token, entry in zip(expected, tokens, entries, strict=True):
            assert entry.token == token
            assert abs(entry.logprob - row[token]) < 1e-3
            best, ids = row.topk(3)
            assert [logprob for _, logprob in entry.top] == pytest.approx(best.tolist(), abs=1e-3)
            assert entry.top[0][0] == ids[0]


@pytest.mark.parametrize("step_rows", [7, 512])
def test_prompt_logprobs_are_the_models_own_whatever_was_cached(tmp_path, step_rows):
    engine = tiny_engine(tmp_path, step_rows=step_rows, cache_tokens=14 * 16, max_model_len=200)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    prompt = prompts(1, seed=21)[0] + tuple(range(100, 180))
    plain = sampled_params(60, "full")
    (expected,) = answer_all(engine, [prompt], [plain])  # its prefix is cached now
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    requests = [Request(str(index), prompt, replace(plain, prompt_logprobs=2)) for index in range(3)]
    requests.append(Request("resumed", prompt, requests[0].params, emitted=tuple(expected.tokens[:5])))
    for request in requests:
        engine.submit(request)
    read: dict[str, list] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            read.setdefault(output.request_id, []).append(output.prompt_logprobs)
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        assert pages_are_accounted_for(engine)
    assert tokens.pop("resumed") == expected.tokens[5:]
    assert not any(read.pop("resumed"))
    assert all(got == expected.tokens for got in tokens.values())
    for first, *rest in read.values():
        assert not any(rest)
        assert [entry.token for entry in first] == list(prompt[1:])
        for row, entry in zip(logprobs, first, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
            assert [score for _, score in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
            assert (row > row[entry.token] + 1e-3).sum() < entry.rank <= (row > row[entry.token] - 1e-3).sum() + 1
    assert read["0"] == read["1"] == read["2"]
