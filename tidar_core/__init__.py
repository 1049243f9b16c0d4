"""TiDAR decoding on one device: token ids in, token ids out.

Start with `layout.py`: one step of one sequence as arithmetic.

    engine                scheduling and steps
    model                 decoder, weights, adapters
    kernels               the operations of each device
    sampling              the rule that fixes every token by prefix, parameters and seed
    grammar               what an answer may be made to follow
    convert               how a model gets its drafter
    bench                 what is measured, and how to repeat it
    data                  what is shipped: the default model's adapter, tiles that GPUs multiply by

    request.py            the nouns of a request and its answer
    text.py               from tokens to text
    prefixes.py           names by which computed prefixes are found again
    config.py             describes a model and an engine; settings.py reads what a user states of them
    transfer.py           the way to a device; memory.py: how much memory is free

    cli.py                the `tidar` command; arguments.py: what its commands have in common
    terminal.py           how a command shows an answer
    imports.py            spares time at every start
    error_text.py         what an error says in a line
    files.py              writes files that appear whole or not at all; signals.py: the signals that ask for an end

Neither ray nor gradio is imported from here. The command line imports the cluster when it is asked to serve.
"""

import os

# A step is some hundred short parallel regions. By default GNU's OpenMP threads spin for long at the end of each;
# where another process wants the core, that made a step up to thirty times slower, and spinning less than this cost
# as much on a quiet machine. The runtime reads the variable once, when torch is first imported.
SPINS = "GOMP_SPINCOUNT"
SPINS_OF_AN_ENGINE_ALONE = "20000"
os.environ.setdefault(SPINS, SPINS_OF_AN_ENGINE_ALONE)
