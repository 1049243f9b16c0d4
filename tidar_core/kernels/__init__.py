"""The operations that the decoder is made of, behind one frozen record.

Read first: ops.py (what each operation takes and gives), then reference.py (the same in plain torch).

    ops.py                  the record `Ops`, the rows of a step, the K/V pages
    reference.py            `Ops` in plain torch: runs anywhere, and is the oracle of every faster one
    rules.py                token rules as numbers, for the kernels that pick tokens
    experts.py              a mixture of experts in plain torch
    succession.py           what a step leaves to the next one, in plain torch; columns.py: the columns of its arrays
    sources.py              a name for the code that decides a row's bits and its token

On a CPU, compiled once on the user's machine:

    cpu.py                  `Ops` of a CPU, and its matrix products (cpu_gemm.cpp, cpu_gemm_int8.cpp, cpu_gemm_int4.cpp)
    cpu_rows.py             row-wise operations (cpu_kernels.cpp) and attention (cpu_queries.cpp, cpu_attention.cpp)
    cpu_pack.py             matrices laid out for the products, whole or in fewer bits
    cpu_pass.py             all layers as one call (cpu_pass.cpp)
    cpu_experts.py          the experts of a layer as one call (cpu_experts.cpp)
    cpu_pick.py             the tokens of all rows as one call (cpu_pick.cpp)
    cpu_slots.py            the drafts of whole proposals as one call (cpu_slots.cpp)
    cpu_build.py            the compiler: as much of the source as a start needs, kept between starts
    cpu_calls.py            how functions of the compiled libraries are called
    cpu_training.py         for training alone: gradients of the row-wise operations (cpu_training.cpp)
    cpu_blocks.py           for training alone: attention of blocks and its gradient (cpu_blocks.cpp)

    cpu_lanes.cpp           sixteen lanes at once: one register with AVX-512, two with AVX2, four elsewhere
    cpu_tiles.cpp           bf16 where the processor multiplies tiles (AMX), with cpu_attention_tiles.cpp
    cpu_attention_few.cpp   the same attention for few queries

On an NVIDIA GPU, imported only where triton is installed:

    triton_ops.py           `Ops` of a GPU
    triton_layers.py        all layers, with what stands between the products done within them
    triton_gemm.py          matrix products: one tile of outputs and one order of sums for each weight
    triton_tiles.py         how they are cut into tiles: measured for a weight, else by rule
    triton_attention.py     paged attention over a list of work that the device makes itself
    triton_rows.py          row-wise operations
    triton_experts.py       a mixture of experts, whose rows the host never counts
    triton_sampling.py      the token rule
    triton_succession.py    succession.py, each function as one launch
    triton_launch.py        lets a kernel begin while the one before it still runs
    triton_blocks.py        for training alone: attention of mask blocks and its gradient

Weights and K/V pages may be in 8 bits on a GPU (`tidar_core.model.float8`). The Triton kernels are tested interpreted
and compiled for Hopper, and against their oracles on an H200 (`tidar bench kernels`).

A row's result depends on that row and the keys it sees alone, bit for bit, whatever else is in the batch: norms,
rotation and activation work row by row, attention reads keys in order of position. Matrix products keep the rule at
multiples of `Ops.row_multiple` rows where the library below them does; the engine probes it at warm-up.
"""
