"""The engines that a user might take instead, on the same weights, prompts and machine: `tidar bench peers`.

Each engine runs in a process of its own (`worker.py`, in the peer's own virtual environment, which `install.sh` makes;
transformers runs in ours where it has none) and answers what it is sent; `compare.py` sends every round to all of them
in turn, so that what else the machine does falls on all alike, and takes medians of the ratios within a round.
`command.py` is the command.
"""
