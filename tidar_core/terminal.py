"""An answer in the terminal, token by token, with what was drafted and what became of it."""

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from tidar_core.engine import Engine
from tidar_core.model.tokenizer import chat_prompt, plain_prompt
from tidar_core.request import DraftMode, Finish, Request, RequestError, SamplingParams, StepOutput
from tidar_core.text import TextStream

HELD, OWN, REJECTED = "green", "bold", "dim red strike"


def print_answer(
    engine: Engine,
    prompt: str,
    *,
    raw: bool,
    plain: bool,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    drafts: DraftMode,
) -> None:
    """Prints the answer as it grows; with `plain` nothing but the answer. Where top_p or top_k is None, and in what is
    not asked for here, it is sampled as the model's defaults say. Raises RequestError."""
    tokens = (plain_prompt if raw else chat_prompt)(engine.tokenizer, prompt)
    room = engine.info.max_model_len - len(tokens)
    sampling = engine.info.sampling_defaults.but(temperature=temperature, top_p=top_p, top_k=top_k)
    params = SamplingParams(
        max_tokens=max(1, min(max_tokens, room)), seed=seed, mid_text=raw, drafts=drafts, **asdict(sampling)
    )
    engine.submit(Request("terminal", tokens, params))
    console = Console(highlight=False, soft_wrap=True)
    text = TextStream(engine.tokenizer, mid_text=raw)
    if not plain:
        legend = Text.assemble(
            ("held drafts", HELD), "  ", ("the model's own", OWN), "  ", ("rejected drafts", REJECTED)
        )
        console.print(legend, end="\n\n")
    ended: Finish | None = None
    emitted = steps = drafted = held = 0
    while engine.has_work:
        for output in engine.step():
            console.print(_step_text(engine, text, output, plain), end="")
            ended = output.finish
            if output.trace is not None:
                emitted += len(output.tokens)
                steps += output.trace.step > 0
                drafted += len(output.trace.drafted)
                held += output.trace.accepted
    console.print(Text(text.finish()))
    if ended is not None and ended.error is not None:
        raise RequestError(f"the answer broke off: {ended.error}")
    if not plain and steps:
        rate = f", {held / drafted:.0%} of {drafted} drafts held" if drafted else ""
        console.print(f"\n{emitted} tokens, {(emitted - 1) / steps:.2f} tokens per step{rate}", style="dim")


def _step_text(engine: Engine, text: TextStream, output: StepOutput, plain: bool) -> Text:
    """What one step adds to the screen: held drafts, rejected ones, the token that the model said instead."""
    line = Text()
    trace = output.trace
    for index, token in enumerate(output.tokens):
        own = trace is None or index >= trace.accepted
        if own and trace is not None and not plain and len(trace.drafted) > trace.accepted:
            rejected = str(engine.tokenizer.decode(list(trace.drafted[trace.accepted :])))
            line.append(rejected.replace("\n", "⏎"), REJECTED)
        line.append(text.push([token]).text, "" if plain else OWN if own else HELD)
    return line
