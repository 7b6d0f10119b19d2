"""MemoTransformerLayer: Megatron's TransformerLayer in token chunks, swapped or recomputed.

`transformer_layer` is the layer, `chunks` the policy that cuts the sequence, `segment` one
token-wise piece on one chunk, `attention` the one whole-sequence step, `rows` the autograd
Functions that cut and join without concatenating, `parameter_sum` weight gradients of several
chunks, `replay` what recompute has to restore,
`stand_in` the seam through which upstream's own forward code runs piecewise, `spec` how Megatron
gets the layer.
"""
