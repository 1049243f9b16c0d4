"""What is measured here, on which prompts, and how to repeat it: `tidar bench`.

Read first: exact.py (the promise), decode.py (the speed), then prompts.py and drive.py, which all of them use.

    prompts.py            prompt sets, read from installed packages
    drive.py              runs requests through an engine to their end

    exact.py              drafts change the speed, never the text: against transformers and plain decoding
    acceptance.py         tokens per step
    decode.py             tokens per second
    prefix.py             what a known prefix saves
    perplexity.py         what weights in fewer bits do to the model
    policy.py             what the draft policy's choices are worth: records how far drafts hold in real answers,
    real_steps.py         what real steps take beside the measured curves,
    simulate.py           and walks the policy through both, without a model
    soak.py               minutes of mixed traffic
    peers/                other engines on the same prompts

    kernels.py            every GPU kernel against its oracle and its limit
    kernel_checks.py      the checks; layer_checks.py and expert_checks.py: those of layers and of mixtures of experts
    checking.py           what checks are made of
    measures.py           how near each kernel is to what the GPU can do; reading.py: the kernel that only reads
    tuning.py             which tiles suit a weight on this GPU
    shapes.py             the shapes that kernels and steps are measured at
    steps.py              whole steps by rows and context
    gpu.py                all that needs a GPU, as one command; what it found so far lies in records/
    training.py           the drafter's training, and where its time goes
    random_checkpoint.py  a checkpoint of a real shape with random weights

    command.py            the commands; device_command.py: those about a device; choices.py: words for their options

The commands print what they find as a table and, with `--json FILE`, as a record.
"""
