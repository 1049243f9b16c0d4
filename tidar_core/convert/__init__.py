"""How a model gets its drafter: `tidar convert`.

The base stays as it is. A low-rank adapter and a mask embedding for each slot act on mask rows alone. There they learn
to say what the base will say a few tokens later. They learn from text that the model itself generates ("its own
words"), so nothing but the checkpoint is needed.

    run.py            the whole way, resumable: gather, train, write (`command.py`, `screen.py`: the terminal's side)
    gathering.py      its first part: which documents there are, which are still to be made
    options.py        what a user chooses; lock.py: one run at a time in a folder; spent.py: how much of the time
                      gathering leaves for training; ending.py: a signal waits until what was done is saved
    base.py           the base model: what it is, and its weights when they are needed
    start.py          what training begins from, checked before anything takes long

    seeds.py          first words that give the questions their variety
    template.py       the chat template, cut open at the user's turn
    conversations.py  jobs fixed by number and seed, each led to a finished document
    sources.py        who generates: the engine, or transformers
    own_words.py      drives jobs through a source into shards; given.py: the user's prompts and text, read
    shards.py         documents on disk: append-only, whole or absent; growing.py: those that are not finished;
                      files.py: how a file is written

    blocks.py         anchors at random, mask blocks behind them, whole or of several sizes
    forward.py        the two passes of a step: clean rows once without gradient, mask rows behind them
    attention.py      what they see, in plain torch; on a GPU flex.py, and fused.py for the mask rows; on a CPU in fp32
                      cpu_blocks.py
    ops.py            the decoder's operations with gradients written out
    losses.py         KL and total variation, slot weights; loss and gradient a few rows at a time
    vocabulary.py     the part of the vocabulary that a step's loss is computed over
    drafter.py        the trained tensors; sampler.py: what a step sees; checkpoint.py: saves, so that it may be killed
                      at any time
    crew.py           several workers on one drafter: the few calls by which they stay together (`cluster.training`)
    trainer.py        the loop; pace.py: when it is measured and saved; held_out.py: tokens per step, as decoding would
                      go; speed.py: rows against the peak
    card.py           the folder that comes out

    full.py           the paper's own training instead: one set of weights for both roles (`--mode full`)
    full_run.py       its way from a checkpoint and a text to a model that serves itself
    full_folder.py    the folder that the result goes to: which folders may be replaced, and how

`tidar_core/bench/records/training.md` has what was measured of all this: the recipe of the shipped drafter, what makes
drafts hold, what the parts of an adapter are worth and what they cost on a GPU.

In a mixture of experts the drafter adapts attention alone. Mask rows go through one more expert, the drafter's own,
which is as wide as the rank: adapters for all other experts would be larger than their tokens are worth.

A block behind the context end c stands for a proposal of the engine (`tidar_core.layout`): slot s sits at position
c + s, sees the positions below c and its own block, and should agree with the base's row c + s - 1.
"""
