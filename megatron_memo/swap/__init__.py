"""The swap engine: activations to host memory behind the forward, and back before the backward.

`engine` holds the protocol and the process-wide state, `layer_pass` one layer's steps forward and
backward, `context` one layer's tensors of one micro-batch, `group` those of them that travel
together, `backend` what a device must offer, `cpu` and `cuda` the two devices, `host` the host
memory.
"""
