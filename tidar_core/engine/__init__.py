"""The engine: token ids in, token ids out, one device, many requests at once.

Read first: `tidar_core/layout.py` (what one step is), then engine.py, scheduler.py and flight.py.

    engine.py             a request's whole way: submit, abort, and `step`, which moves all of them on
    flight.py             steps that overlap: the next one is launched before the host knows the answers of this one
    start.py              what a user chose -> an engine that is ready to serve

    arrival.py            what a request must be, and the sequence that it becomes
    scheduler.py          plans a step's rows and pages, commits its answers; who runs, waits, is preempted
    step_budget.py        who runs in the step that is planned, and with how many known tokens
    turns.py              sequences with slow grammars take turns
    pages.py              the pool of K/V pages: free, owned, cached (`tidar_core.prefixes` names the shared ones)
    ending.py             where an answer ends

    draft_policy.py       how much to draft: the shape of each sequence, the most tokens per second for the batch
    acceptance_rates.py   how often drafts are accepted
    step_cost.py          what a step costs, by its rows
    cost_cache.py         measured costs kept on disk, checked at the next start

    row_layout.py         what steps that lay the same rows share; kept while they repeat
    batch.py              plans -> the tensors of a forward pass, in one copy
    runner.py             the model on its device: hidden states, then the scores of chosen rows
    graphs.py             steps as CUDA graphs
    drafting.py           the drafts of a proposal that came true
    penalties_ahead.py    penalties for tokens that only the device knows yet

    grammars.py           compiles grammars, off the engine's thread
    constraint.py         follows a grammar through tokens and drafts
    timed_calls.py        waits for what may take for ever, but only so long
    thought_watch.py      ends thoughts that are long enough

    ops_choice.py         which kernels the engine runs on
    room.py               positions of a request, and how many pages there is memory for
    warmup.py             proves on the loaded model that a row's bits do not depend on its batch; measures costs

A step is computed in one of two ways, and both must give the same tokens:

    on the host     `Engine._step_alone`: the device computes scores, and the host picks tokens, commits and drafts. The
                    verify rows' tokens come to the host; `Scheduler.commit` compares them with the drafts
                    (`layout.count_committed`); then the drafts of the proposal that came true are picked.
    on the device   `flight.launch` and `Flight.land`: `carry` moves the rows on to where the step before ends, the
                    verify rows' tokens are picked, `decide` compares them with the drafts and finds the proposal that
                    came true, `renew` puts its drafts into the state. The host launches the next step
                    (`Scheduler.plan_ahead`) before it reads the tokens, then commits as ever (`flight.settled`).

A step runs on the device if steps overlap (`EngineConfig.overlap_steps`), every plan emits, and `flight.may_fly` is
true of every sequence. It is false where something needs the host between two steps: grammars, log-probabilities, bad
words, `min_tokens` that is not reached yet, and `draft_trust` below 1.

`carry`, `decide` and `renew` (`tidar_core.kernels.succession`) are `tidar_core.layout` on tensors;
tests/tidar_core/kernels/test_succession.py checks that. tests/tidar_core/engine/test_flight.py
(`test_the_same_is_said_and_drafted`) checks that both ways give the same tokens and drafts.

K/V at positions below a sequence's cursor come from committed tokens under causal attention; mask rows never write
pages; a rejected draft moves a cursor and nothing else.
"""

from tidar_core.engine.engine import Engine, EngineInfo, EngineStats
from tidar_core.engine.start import keep_loaded, load_engine

__all__ = ["Engine", "EngineInfo", "EngineStats", "keep_loaded", "load_engine"]
