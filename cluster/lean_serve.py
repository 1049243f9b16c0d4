"""Ray Serve, imported without pandas: what the processes of our own Ray import first of all.

Wherever pandas is installed, as Gradio needs it, Serve imports it into each of its seven processes, for tables that an
answer might be and none of ours is: half a second of a core and 40 MB each. Whoever needs it imports it later.
"""

import sys

from tidar_core.imports import quick_imports

spared = "pandas" not in sys.modules
if spared:
    sys.modules["pandas"] = None  # type: ignore[assignment]  # as Python notes what is not to be found
try:
    with quick_imports():
        from ray import serve  # noqa: F401
finally:
    if spared:
        del sys.modules["pandas"]
