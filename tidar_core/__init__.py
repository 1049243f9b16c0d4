"""TiDAR decoding on one device: token ids in, token ids out.

Start with `layout.py`, one step of one sequence as arithmetic. `request.py` has the nouns, `sampling.py` the rule that
fixes every token by prefix, parameters and seed (with `philox.py`, its random numbers, `penalties.py`, what changes the
scores before it, and `bad_words.py`, what never comes), `grammar.py` what an answer may be made to follow
(`grammar_compiling.py` compiles it, `json_patterns.py` the patterns within, `grammar_guard.py` at a safe distance),
`text.py` the way from tokens to text, `prefixes.py` the names by which computed prefixes are found again. `config.py`
describes a model and an engine, `transfer.py` the way to a device; `settings.py` reads what a user states of them,
`memory.py` tells how much memory is free, `error_text.py` what an error says in a line; `files.py` writes files that
appear whole or not at all, `signals.py` has the signals that ask for an end. The rooms: `engine` (scheduling and
steps), `model` (decoder, weights, adapters), `kernels` (the operations of each device), `convert` (how a model gets its
drafter), `bench` (what is measured, and how to repeat it). `cli.py` is the `tidar` command, `arguments.py` what its
commands have in common, `terminal.py` how one shows an answer; `imports.py` spares time at every start; `data` has what
is shipped: the default model's adapter, tiles that GPUs multiply by.

Neither ray nor gradio is imported from here; the command line imports the cluster when it is asked to serve.
"""

import os

# A step is some hundred short parallel regions. By default GNU's OpenMP threads spin for long at the end of each;
# where another process wants the core, that made a step up to thirty times slower, and spinning less than this cost
# as much on a quiet machine. The runtime reads the variable once, when torch is first imported.
SPINS = "GOMP_SPINCOUNT"
SPINS_OF_AN_ENGINE_ALONE = "20000"
os.environ.setdefault(SPINS, SPINS_OF_AN_ENGINE_ALONE)
