"""How an answer ends: what of the tokens that a step decided is sent, and whether anything comes behind them."""

from typing import TYPE_CHECKING

from tidar_core.engine.constraint import CROWDED
from tidar_core.request import Finish, FinishReason, Sequence

if TYPE_CHECKING:
    from tidar_core.engine.constraint import Constraint


def ends_of(sequence: Sequence, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end the answer. Under a grammar the end of sequence ends one that else ignores it."""
    params = sequence.request.params
    ignored = params.ignore_eos and params.grammar is None
    return params.stop_token_ids if ignored else params.stop_token_ids | eos_ids


def settle(sequence: Sequence, emitted: list[int], max_positions: int) -> tuple[list[int], Finish | None]:
    """The part of `emitted` that is sent, cut at the first stop, and how the sequence ends, if it does."""
    finish: Finish | None = None
    for index, token in enumerate(emitted):
        if token < 0:
            emitted = emitted[:index]
            finish = Finish(FinishReason.ERROR, error="the model gave scores that are not numbers")
            break
        if token in sequence.ends:
            emitted, finish = emitted[: index + 1], Finish(FinishReason.STOP, token)
            break
    remaining = sequence.remaining(max_positions)
    if finish is None and len(emitted) >= remaining:
        emitted, finish = emitted[:remaining], Finish(FinishReason.LENGTH)
    if sequence.constraint is not None:
        has_stops = bool(sequence.request.params.stop_token_ids)
        emitted, finish = _follow(sequence.constraint, emitted, finish, has_stops)
    if sequence.stop_watch is not None:
        by_id = finish is not None and isinstance(finish.stop, int)  # the text of that token is not in the answer
        shown = sequence.stop_watch.push(emitted[:-1] if by_id else emitted)
        if shown.stop is not None:
            return emitted[: shown.used], Finish(FinishReason.STOP, shown.stop)
    return emitted, finish


def _follow(
    constraint: "Constraint", emitted: list[int], finish: Finish | None, has_stops: bool
) -> tuple[list[int], Finish | None]:
    """Moves a constraint on behind the tokens; those that the answer has room for, and how it ends, if it does.
    has_stops: the request names tokens that end it, which then stand only where the grammar may end."""
    until = constraint.advance(emitted)
    if constraint.error is not None:
        field = None if constraint.error == CROWDED else "grammar"
        return emitted[:until], Finish(FinishReason.ERROR, error=constraint.error, param=field)
    if until < len(emitted):
        return emitted[:until], Finish(FinishReason.STOP)
    if finish is not None and finish.reason is FinishReason.ERROR:
        mask = constraint.mask()
        if mask is not None and not mask.any():
            why = "no token can go on with the grammar here"
            finish = Finish(FinishReason.ERROR, error=why, param="grammar")
            if has_stops:
                why += " but those of stop_token_ids, with which it may not end here"
                finish = Finish(FinishReason.ERROR, error=why, param="stop_token_ids")
    if constraint.ended and (finish is None or finish.reason is FinishReason.LENGTH):
        finish = Finish(FinishReason.STOP)
    return emitted, finish
