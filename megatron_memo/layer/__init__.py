"""MemoTransformerLayer: Megatron's TransformerLayer in token chunks, swapped or recomputed.

transformer_layer  the layer
chunks             the policy that cuts the sequence
segment            one token-wise piece of the layer on one chunk
attention          the one whole-sequence step
rows               cutting and joining sequences without concatenating
parameter_sum      weight gradients of several chunks
collect            what those two share: gradients collected outside of autograd's own sums
replay             what recompute has to restore
stand_in           the seam through which upstream's own forward code runs piecewise
spec               how Megatron gets the layer
"""
