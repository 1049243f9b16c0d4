"""How a model gets its drafter: `tidar convert`.

The base stays as it is. A low-rank adapter and a mask embedding for each slot act on mask rows alone, and learn to say
there what the base says a few tokens later. The data are the model's own words, so that nothing but the checkpoint is
needed.

    run.py            the whole way, resumable: gather, train, write (`command.py`, `screen.py`: the terminal's side)
    options.py        what a user chooses of it; lock.py: one run at a time in a folder
    start.py          what training begins from, checked before anything takes long

    seeds.py          first words that give the questions their variety
    template.py       the chat template, cut open at the user's turn
    conversations.py  jobs fixed by number and seed, each led to a finished document
    sources.py        who generates: the engine, or transformers
    own_words.py      drives jobs through a source into shards; given.py: the user's prompts and text, read
    shards.py         documents on disk: append-only, whole or absent; growing.py: those that are not finished

    blocks.py         anchors at random, mask blocks behind them, whole or of several sizes
    forward.py        the two passes of a step: clean rows once without gradient, mask rows behind them
    attention.py      what they see, in plain torch; on a GPU flex.py, and fused.py for the mask rows; on a CPU in fp32
                      cpu_blocks.py
    ops.py            the decoder's operations with gradients written out
    losses.py         KL and total variation, slot weights; loss and gradient a few rows at a time
    vocabulary.py     the part of the vocabulary that a step's loss is computed over
    drafter.py        the trained tensors; sampler.py: what a step sees; checkpoint.py: kill it any time
    crew.py           several workers on one drafter: the few calls by which they stay together (`cluster.training`)
    trainer.py        the loop; held_out.py: tokens per step, as decoding would go; speed.py: rows against the peak
    card.py           the folder that comes out

    full.py           the paper's own training instead: one set of weights for both roles (`--mode full`)
    full_run.py       its way from a checkpoint and a text to a model that serves itself
    full_folder.py    the folder that this goes to: which may be replaced, and how

On one GPU, for the default model, in runs of nine minutes of which each goes on from the last (other seeds, so that it
gathers other words; the optimizer starts anew):

    tidar convert --start default --device cuda --minutes 7 --seed 1 --out first
    tidar convert --start first --device cuda --minutes 7 --seed 2 --out second

(Starting the engine, capturing its graphs and compiling take more than a minute besides.) On an H200 such a run, of 6.8
minutes, gathered 1.8 million own words and went through 16.6 million mask rows: 2.61 tokens per step on its held-out
documents before, 2.81 after. Training by itself (`tidar bench training`) is 151,700 mask rows a second there, an eighth
of what the GPU multiplies; a seventh of the time the GPU waits, and about half of the rest goes to what stands between
the products. On an H100 the run before that, of 7.2 minutes, had 1.4 million own words and 11.6 million mask rows,
52,000 to 62,000 a second, before mask rows had attention kernels of their own.

What makes drafts hold, at equal time: each variant got three and a half minutes of training from nothing on the same
171,439 own words of the default model (2 cores, 300 to 350 mask rows a second; one run each):

    what is different               mask rows   tokens per step   slots that hold    command
                                                on held-out words 0, 1, 2
    nothing                            59,672   1.354             0.29 0.06 0.01
    causal inside the block            61,704   1.364             0.29 0.06 0.01     --within-block causal
    slots by how often reached         59,672   1.357             0.29 0.06 0.01     --slot-weights product
    own attention, rank 96             61,704   1.353             0.28 0.05 0.01     --projections qkv,o --rank 96
    half KL, half total variation      59,672   1.349             0.29 0.06 0.01     --kl-share 0.5
    total variation                    53,360   1.304             0.24 0.04 0.01     --kl-share 0
    no slot head                       56,432   1.248             0.21 0.02 0.00     --slot-head 0

    tidar convert --out VARIANT --data WORDS --own-tokens 160000 --minutes 9.7 OPTION

(6.2 of these minutes are those that the words took.) Other programs ran beside the one with total variation, which got
a tenth fewer rows for it, so that it is not at equal time; what a second run of the same would give was not measured.
The slot head stands out, and total variation alone perhaps; of the others one run tells nothing. Nor does so short a
training tell where each would end: the shipped adapter had 31.8 million rows, in five stages.

Another day, three and a half minutes each again, on 94,223 own words (`--own-tokens 80000 --minutes 7`), 13 held-out
documents:

    what is different               mask rows   tokens per step   slots 0, 1, 2      command
    nothing                            55,384   1.360             0.28 0.05 0.01
    nothing, another seed              51,832   1.348             0.26 0.05 0.01     --seed 1
    blocks that grow                   53,263   1.352             0.27 0.05 0.01     --block-sizes growing
    blocks of all sizes                44,076   1.325             0.26 0.05 0.01     --block-sizes mixed
    the upper half of the layers       56,920   1.332             0.26 0.05 0.01     --layers 15-29

Growing cannot be told from whole blocks; mixed ones gave fewer rows in the time, and were behind; half of the layers is
a little behind with half of the adapter (9 MB instead of 17). (The other seed's run began while the last seconds of the
one with half of the layers ran.)

More anchors behind a document mean fewer clean rows for a mask row (64: 0.60, 96: 0.42), and fewer documents a step. At
about as many steps, 37 with 64 and 38 with 96, on 87,278 own words, 60 held-out documents (`--anchors 96`):

    anchors   seed   mask rows   tokens per step   slots 0, 1, 2
    64        0      61,776      1.372             0.29 0.06 0.01
    64        1      59,864      1.362             0.29 0.05 0.01
    96        0      63,736      1.378             0.29 0.06 0.01
    96        1      62,080      1.323             0.26 0.05 0.01

Steps of 96 took 7 to 9 % less time (a core for each run, clean rows in plain torch): three more were their due, and
what these bring was not measured. The seeds of 96 differ by 0.055, so that nothing speaks for it yet, and 64 stay.

What the parts of a trained adapter are worth: the shipped one without some of them, the others as they were, on 24
held-out documents of 131,295 new own words, which the base says anew for `--seed 77`. Beside it what a part costs: µs a
layer for 64 rows on an H100, 56 of them drafting, products with it less products without it, as in
`tidar_core/bench/records`:

    left out               tokens per step   SmolLM2-135M   Qwen3-8B
    nothing                2.522             3.52 in all    8.71 in all
    qkv                    2.185             0.81           1.35
    o                      2.371             0.86           1.54
    gate_up                2.244             0.78           3.01
    down                   2.469             1.07           2.82
    qkv and o              2.074
    gate_up and down       2.001
    layers 0-4, 5-9        2.440, 2.449      a sixth each
    layers 10-14, 15-19    2.406, 2.197
    layers 20-24, 25-29    2.302, 2.425
    layers 0-9             2.320             a third

    tidar convert --start default --seed 77 --data WORDS --own-tokens 120000 --steps 1 --out WHOLE
    tidar convert --start default --seed 77 --data WORDS --own-tokens 1 --steps 1 --out PART --projections qkv,o,gate_up

(what they say at step 0; the drafter never learnt to do without). `down` brings least for its time, so that one was
trained on without it: 149,104 mask rows (`--steps 90 --learning-rate 5e-4`) took it from 2.469 to 2.444, and the whole
from 2.522 to 2.532. That is 2 to 3.5 % of the tokens; of the 1,238 µs that a step of 64 rows took the H100, `down` is
2.6 %. So all four stay.

Of a mixture of experts the drafter adapts attention alone, and mask rows go through one more expert, of its own, which
is as wide as the rank: adapters for all of the others would be larger than their tokens are worth. No published mixture
was at hand; on a tiny random one (three layers, 400 steps of the same words, one run each) drafts held for 1.377 tokens
per step with it and for 1.341 without (`--projections qkv,o`).

A block behind the context end c stands for a proposal of the engine (`tidar_core.layout`): slot s sits at position
c + s, sees the positions below c and its own block, and should agree with the base's row c + s - 1.
"""
