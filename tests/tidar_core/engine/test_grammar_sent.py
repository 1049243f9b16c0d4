"""Grammars that take long to compile, with as many tokens as Qwen has: compiled once, and read as they were."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from tidar_core.engine import grammars
from tidar_core.engine.grammars import Compiler, Grammars
from tidar_core.grammar import guarding
from tidar_core.grammar.grammar import Grammar, schema_grammar
from tidar_core.grammar.guarding import MOST_SENT, SENT_A_SECOND, is_worth_sending

MANY_TOKENS = 152_000
BOUNDED = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 80}, "summary": {"type": "string", "maxLength": 300}},
    "required": ["title", "summary"],
}


def compiler_of(count: int) -> Compiler:
    """For made up tokens: all bytes, words with and without a space, Chinese characters, marks."""
    draw = random.Random(0)
    texts = {b"end": 0} | {bytes([byte]): 0 for byte in range(256)}
    while len(texts) < count:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", range(26, 0, -1), k=draw.randint(2, 6)))
        signs = "".join(chr(draw.randint(0x4E00, 0x6E00)) for _ in range(draw.randint(1, 3)))
        mark = draw.choice(['"', ',"', '":', " {", "\n  ", "\\", " =", "()"])
        texts[draw.choice([f" {word}"] * 5 + [word] * 3 + [signs, mark + word]).encode()] = 0
    tokens = xgrammar.TokenizerInfo([*texts], stop_token_ids=[0])
    native = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    return Compiler(native, tokens, tokens.serialize_json())


@pytest.fixture(scope="module")
def few() -> Compiler:
    return compiler_of(4_000)


def grammars_of(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(grammars, "token_table", lambda *about: compiler.tokens)
    tokenizer: Any = None
    return Grammars(tokenizer, compiler.tokens.vocab_size, (0,))


def test_long_texts_compile_with_many_tokens_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The guard has four times as long for the tokens: a busy machine may take that for them."""
    script, root = tmp_path / "guarding.py", Path(guarding.__file__).parents[2]
    lines = ["from tidar_core.grammar import guarding", "guarding.TOKENS_A_SECOND //= 4", "guarding.main(False)"]
    script.write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
    monkeypatch.setattr(guarding, "__file__", str(script))
    own = grammars_of(compiler_of(MANY_TOKENS), monkeypatch)
    monkeypatch.setattr(Compiler, "compiled", None)
    compiled = own.compiled(Grammar("regex", r"[a-z ]{2,300}\.")).result()
    assert xgrammar.GrammarMatcher(compiled).accept_string("a text.")
    (size,) = own._sizes.values()
    assert compiled.memory_size_bytes < size < MOST_SENT


@pytest.mark.parametrize(
    "grammar",
    [
        schema_grammar(BOUNDED),
        schema_grammar({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]+$"}}}),
        Grammar("json_object"),
        Grammar("regex", r"([a-z]{2,50} ){1,8}\."),
        Grammar("ebnf", 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"'),
    ],
    ids=["bounded", "pattern", "object", "regex", "ebnf"],
)
def test_what_is_read_allows_the_same_tokens(few: Compiler, grammar: Grammar) -> None:
    compiled = few.compiled(grammar)
    read = few.read(compiled.serialize_json())
    assert read is not None
    draw, size = random.Random(1), few.tokens.vocab_size
    words = torch.zeros(2, xgrammar.get_bitmask_shape(1, size)[1], dtype=torch.int32)
    steps = 0
    for _ in range(12):
        both = [xgrammar.GrammarMatcher(one) for one in (compiled, read)]
        for _ in range(60):
            for row, matcher in enumerate(both):
                matcher.fill_next_token_bitmask(words, row)
            assert torch.equal(words[0], words[1])
            allowed = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[:size]
            token = draw.choice(np.flatnonzero(allowed).tolist())
            assert [matcher.accept_token(token) for matcher in both] == [True, True]
            steps += 1
            assert both[0].is_terminated() == both[1].is_terminated()
            if both[0].is_terminated():
                break
    assert steps > 20


def sends(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has guards send a text and die."""
    script = tmp_path / "guard.py"
    lines = ["import os, sys", "sys.stdin.readline(), sys.stdin.readline()", f"sys.stdout.write({text!r})"]
    script.write_text("\n".join([*lines, "sys.stdout.flush()", "os.kill(os.getpid(), 9)"]))
    monkeypatch.setattr(guarding, "__file__", str(script))


@pytest.mark.parametrize("broken", ["no memory", "half", "foreign", "of other tokens", "of another version"])
def test_what_cannot_be_read_is_compiled_here(
    few: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    grammar = Grammar("regex", "[0-9]{2}")
    whole = few.compiled(grammar).serialize_json()
    others = json.dumps(json.loads(whole) | {"__VERSION__": "v0"})
    sent = {
        "no memory": "\n",
        "half": whole[: len(whole) // 2],
        "foreign": '{"grammar": []}\n',
        "of other tokens": compiler_of(300).compiled(grammar).serialize_json() + "\n",
        "of another version": others + "\n",
    }
    sends(tmp_path, "true\n" + sent[broken], monkeypatch)
    own = grammars_of(few, monkeypatch)
    compiled = own.compiled(grammar).result()
    assert xgrammar.GrammarMatcher(compiled).accept_string("12")
    assert not own._sizes
    sends(tmp_path, "true\n" + whole + "\n", monkeypatch)
    monkeypatch.setattr(Compiler, "compiled", None)
    assert grammars_of(few, monkeypatch).compiled(grammar).result().memory_size_bytes == compiled.memory_size_bytes


def test_what_is_written_slowly_is_not_sent(few: Compiler) -> None:
    """Its states are written once for each of its rules."""

    def compiled(rules: int, mask_bytes: int = 0) -> Any:
        return SimpleNamespace(grammar="root ::= a\n" * rules, memory_size_bytes=mask_bytes)

    assert is_worth_sending(compiled(100), 0.5)
    assert not is_worth_sending(compiled(100), 0.2)
    assert not is_worth_sending(compiled(1_000), 0.5)
    assert is_worth_sending(compiled(1_000), 5)
    assert not is_worth_sending(compiled(3_000), 1e9)
    assert not is_worth_sending(compiled(1, MOST_SENT), 1e9)
    rules = "\n".join(f'r{i} ::= "a" r{i + 1} | "b" r{i * 7 % 400} [a-z]{{1,5}}' for i in range(400))
    real = few.compiled(Grammar("ebnf", f'root ::= r0\n{rules}\nr400 ::= "x"'))
    size = len(real.serialize_json())
    assert not is_worth_sending(real, size / SENT_A_SECOND)
    assert is_worth_sending(real, 3 * size / SENT_A_SECOND)
