"""The operations that the decoder is made of, behind one frozen record.

`ops.py` says what each operation takes and gives (`Ops`). `reference.py` is that record in plain torch: it runs
anywhere and is the oracle of every faster one. `cpu.py` makes the record of a CPU: `cpu_rows.py` binds
`cpu_kernels.cpp` and attention (`cpu_queries.cpp`, `cpu_attention.cpp`), `cpu.py` itself the products (`cpu_gemm.cpp`;
with weights in fewer bits `cpu_gemm_int8.cpp` and `cpu_gemm_int4.cpp`), whose matrices `cpu_pack.py` lays out. All is
compiled once on the user's machine by `cpu_build.py`, as much of it as a start needs, and called through
`cpu_calls.py`; where the processor multiplies tiles, what is in bf16 does so (`cpu_tiles.cpp`,
`cpu_attention_tiles.cpp`; for few queries `cpu_attention_few.cpp`). `cpu_pass.py` binds `cpu_pass.cpp`, all layers as
one call, `cpu_experts.py` `cpu_experts.cpp`, the experts of one layer, `cpu_pick.py` binds `cpu_pick.cpp`, the tokens
of all rows as one, and `cpu_slots.py` binds `cpu_slots.cpp`, the drafts of whole proposals as one. For training alone
`cpu_training.py` binds `cpu_training.cpp`, gradients of the row-wise operations, and `cpu_blocks.py` `cpu_blocks.cpp`,
attention and its gradient. They are written in `cpu_lanes.cpp`: sixteen lanes at once, one register with AVX-512, two
with AVX2, four elsewhere. `rules.py` makes token rules numbers, for all that pick.

The `triton_*.py` files are the same record (`triton_ops.py`) for an NVIDIA GPU, imported where triton is installed:
paged attention over a list of work that the device makes itself (`triton_attention.py`), row-wise operations
(`triton_rows.py`), products with one tile of outputs and one order of sums for each weight (`triton_gemm.py`), and the
token rule (`triton_sampling.py`); `triton_layers.py` makes of them all layers of a model, with what stands between the
products done within them; `triton_experts.py` is the experts of a mixture (`experts.py`), whose rows the host never
counts. Weights and K/V pages may be in 8 bits (`tidar_core.model.float8`). `triton_launch.py` lets a kernel begin while
the one before it still runs, `triton_succession.py` is what a step leaves to the one behind it (`succession.py`).
`triton_blocks.py` is for training alone: attention of mask blocks with its gradient. They are tested interpreted and
compiled for Hopper, and against their oracles on an H200 (`tidar bench kernels`).

A row's result depends on that row and the keys it sees alone, bit for bit, whatever else is in the batch: norms,
rotation and activation work row by row, attention reads keys in order of position. Matrix products keep the rule at
multiples of `Ops.row_multiple` rows where the library below them does; the engine probes it at warm-up.
"""
