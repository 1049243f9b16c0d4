"""What is measured here, on which prompts, and how to repeat it: `tidar bench`.

`prompts.py` reads prompt sets from installed packages, `drive.py` runs requests through an engine to their end.
`exact.py` checks the first promise (drafts change the speed, never the text) against transformers and against plain
decoding; `acceptance.py` measures tokens per step, `decode.py` tokens per second, `prefix.py` what a known prefix
saves, `perplexity.py` what weights in fewer bits do to the model. `policy.py` records how far drafts hold in real
answers and what real steps take (`real_steps.py`), and walks the draft policy through them on these costs, without a
model (`simulate.py`). `soak.py` runs mixed traffic for minutes, `peers/` other engines on the same prompts.

`kernels.py` (with `kernel_checks.py`, `layer_checks.py`, `expert_checks.py`, `checking.py`, `measures.py`, `tuning.py`,
`reading.py` and `shapes.py`) holds every GPU kernel against its oracle and its limit, `steps.py` times whole steps by
rows and context, and `gpu.py` runs all that needs a GPU as one command; what it found so far lies in `records/`.
`training.py` times the drafter's training and looks where its time goes. `random_checkpoint.py` makes models of real
shapes.

The commands (`command.py`, `device_command.py`; `choices.py` has words for their options) print what they find as a
table and, with `--json FILE`, as a record.
"""
