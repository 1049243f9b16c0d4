"""A causal language model and its drafter: shapes, weights, forward pass.

    weights.py   the tensors as the decoder reads them, projections fused
    rope.py      rotary scaling: what a checkpoint states, and the frequencies that follow
    gguf.py      a GGUF file: its header as a config, its tensors dequantized under transformers' names
    gguf_names.py    what such a file calls them
    mixtures.py  what is stated of a mixture's experts, and what their tensors are called
    quantization.py  what a quantized checkpoint says of how it is stored
    quantized.py     a matrix of one: its tensors, plain numbers of them a few rows at a time
    quantized_layouts.py the layouts: fp8, compressed-tensors, gptq, awq, bitsandbytes, fbgemm_fp8, modelopt, MLX
    tokenizer.py its tokenizer and chat template, put right where files are known to be wrong
    splits.py    how a vocabulary cuts text into words, where files do not say it, or say it wrong
    sources.py   from a name to where a model lies: a directory, a hub id, a GGUF file
    text_part.py what its config.json states of the model of text
    configuration.py its shape, as the checkpoint states it
    sampling_defaults.py how its makers want it sampled
    stacked.py   experts that a file has in two tensors a layer
    loading.py   its weights, fused for the decoder
    footprint.py     how much memory they take, and how much work a token is
    fingerprint.py   which weights these are, told of one by one as they are read
    dense.py     transformers' own model of the same checkpoint: to compare with, to train, to save
    float8.py    matrices and K/V in 8 bits: what is kept of a number
    adapter.py   the drafter adapter: its tensors on disk, its checks, the adapters that are shipped
    adapter_config.py    what it says of itself
    slot_head.py     the drafter's second part: each slot corrected by the token before it
    own_drafter.py   full TiDAR checkpoints, which draft by themselves
    contract.py  what such a checkpoint says of itself
    second_view.py   Orthrus' checkpoints, whose mask rows have attention projections of their own
    decoder.py   the one forward pass of all architectures, with the adapter on mask rows

What is particular to an architecture (biases, QK-norm, tied heads, the layout of a file) ends here: everything above
this room sees one `ModelConfig` and one `ModelWeights`. The base weights are never changed by an adapter, so the
text is the base model's own whatever the drafter.
"""
