"""The texts of single tokens, which together need not be those of their bytes alone."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from tidar_core.request import StepOutput, StepTrace
from tidar_core.text import TextStream, special_texts, token_text


class Spelling:
    """The texts of single tokens for the trace. Those of emitted tokens together are the answer's text: a token that
    only begins a character is spelled empty, the one that completes it has it whole. with_special: special tokens are
    in that text; else they are spelled here alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mid_text: bool = False, with_special: bool = False):
        self._tokenizer = tokenizer
        self._beside_text = {} if with_special else special_texts(tokenizer)
        self._emitted = TextStream(tokenizer, mid_text=mid_text, with_special=with_special)
        self._alone: dict[int, str] = {}

    def emitted(self, token: int) -> dict[str, Any]:
        text = self._emitted.push((token,)).text
        return {"id": token, "text": self._beside_text.get(token, text)}

    def rejected(self, token: int) -> dict[str, Any]:
        if token not in self._alone:
            self._alone[token] = token_text(self._tokenizer, token)
        return {"id": token, "text": self._alone[token]}

    def describe(self, output: StepOutput, trace: StepTrace, replica: str) -> dict[str, Any]:
        """The `tidar` object of a streamed chunk: what was guessed, what held, what the model said itself."""
        held = [self.emitted(token) for token in trace.drafted[: trace.accepted]]
        return {
            "step": trace.step,
            "t_ms": round(trace.seconds * 1000, 3),
            "drafted": held + [self.rejected(token) for token in trace.drafted[trace.accepted :]],
            "accepted": trace.accepted,
            "anchor": None if trace.anchor is None else self.emitted(trace.anchor),
            "block": trace.block,
            "proposals": [{"a": outcome} for outcome in trace.proposals],
            "used": trace.used,
            "rows": {"verify": trace.verify_rows, "mask": trace.mask_rows},
            "replica": replica,
        }
