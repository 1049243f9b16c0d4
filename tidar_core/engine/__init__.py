"""The engine: token ids in, token ids out, one device, many requests at once.

`start.py` makes one of what a user chose, on the kernels of `ops_choice.py` and with the pages of `room.py`.
`engine.py` is the whole way of a request in one `step()`: the scheduler plans rows and pages (`scheduler.py`,
`chosen.py`, `pages.py`, with `tidar_core.prefixes` for those that are shared) in shapes that the draft policy chose
(`draft_policy.py`, by how often drafts held, `acceptance_rates.py`, and the prices of `step_cost.py`), `laid.py` finds
the rows that plans lay, `batch.py` turns them into tensors, `runner.py` runs the model, tokens are picked by the rule
of `tidar_core.sampling`, the scheduler commits up to where an answer ends (`ending.py`), and `drafting.py` picks the
next drafts. On a GPU `graphs.py` replays steps that were captured, and `flight.py` launches the next step while one
runs (`said_ahead.py` counts for penalties what that one says). `grammars.py` compiles what an answer has to follow, off
this thread, `constraint.py` follows it, and `thought_watch.py` ends thoughts that are long enough; those whose grammars
are slow take turns (`turns.py`). `warmup.py` proves on the loaded model that a row's bits do not depend on its batch,
and measures what rows cost, which `cost_cache.py` remembers.

The geometry of a step is `tidar_core.layout`. K/V at positions below a sequence's cursor come from committed
tokens under causal attention; mask rows never write pages; a rejected draft moves a cursor and nothing else.
"""

from tidar_core.engine.engine import Engine, EngineInfo, EngineStats
from tidar_core.engine.start import keep_loaded, load_engine

__all__ = ["Engine", "EngineInfo", "EngineStats", "keep_loaded", "load_engine"]
