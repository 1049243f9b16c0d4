"""Ray Serve, imported without pandas: what the processes of our own Ray import first of all.

Wherever pandas is installed, as Gradio needs it, Serve imports it into each of its seven processes, for tables that an
answer might be and none of ours is: half a second of a core and 40 MB each. Whoever needs it imports it later.
"""

import gc
import sys

spared = "pandas" not in sys.modules
if spared:
    sys.modules["pandas"] = None  # type: ignore[assignment]  # as Python notes what is not to be found
gc.disable()  # it would walk through all that is imported again and again: a fifth of the import's time
try:
    from ray import serve  # noqa: F401
finally:
    gc.enable()
    if spared:
        del sys.modules["pandas"]
