"""What is alive at a trace's peak is told apart by who asked for it and until when."""

import pytest

from megatron_memo.estimate.parts import SWAP_BUFFER, Parts, peak_of
from megatron_memo.phases import BACKWARD, EMBEDDING, FORWARD, HEAD, LAYER, START, UPDATE, Phase
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, Trace

PHASES = (
    START,
    Phase(EMBEDDING, FORWARD, 0),
    Phase(LAYER, FORWARD, 0, 1),
    Phase(HEAD, FORWARD, 0),
    Phase(LAYER, BACKWARD, 0, 1),
    Phase(UPDATE),
)
IN_START, IN_EMBEDDING, IN_LAYER, IN_HEAD, IN_BACKWARD, IN_UPDATE = map(Enter, range(6))


def trace_of(*events, held=(), **header):
    return Trace(Header("profile", rounding=1, **header), PHASES, events, held)


def ask(number, size, what="op"):
    return Malloc(number, size, 0, what)


FORWARD_PASS = (
    ask(0, 1),  # the batch
    IN_EMBEDDING,
    ask(1, 10),  # the layer's input
    IN_LAYER,
    ask(2, 100),  # kept
    ask(3, 1000),  # not kept
    Free(3),
    ask(4, 20),  # the layer's output
)
BACKWARD_PASS = (IN_BACKWARD, Free(4), Free(2), Free(1), IN_UPDATE, ask(9, 7), Free(9), Free(0))


def test_in_a_layer_what_backward_needs_is_skeletal_and_the_rest_transient():
    peak = peak_of(trace_of(*FORWARD_PASS, *BACKWARD_PASS))
    assert peak.where == "layer 1 forward of micro-batch 0"
    assert peak.parts == Parts(skeletals=110, transients=1000, buffers=1)
    assert peak.parts.total == 1111


def test_in_the_head_its_own_blocks_are_the_head():
    head = (IN_HEAD, ask(5, 5000), Free(5))
    peak = peak_of(trace_of(*FORWARD_PASS, *head, *BACKWARD_PASS))
    assert peak.parts == Parts(skeletals=130, head=5000, buffers=1)


def test_what_the_head_keeps_is_skeletal_and_swap_buffers_are_buffers():
    head = (IN_HEAD, ask(5, 50))
    backward = (IN_BACKWARD, ask(6, 3000, SWAP_BUFFER), ask(7, 300), Free(5), Free(6), Free(7))
    peak = peak_of(trace_of(*FORWARD_PASS, *head, *backward, *BACKWARD_PASS[1:]))
    assert peak.parts == Parts(skeletals=180, transients=300, buffers=3001)


def test_a_step_that_needs_most_belongs_to_the_optimizer():
    update = (IN_UPDATE, ask(9, 9999), Free(9), Free(0))
    peak = peak_of(trace_of(*FORWARD_PASS, *BACKWARD_PASS[:4], *update))
    assert peak.where == "update" and peak.parts == Parts(optimizer=9999, buffers=1)


def test_what_is_held_is_split_as_the_header_says_and_the_rest_are_buffers():
    held = (ask(90, 500), ask(91, 60), ask(92, 4))
    split = {"weights": 300, "gradients": 200, "optimizer": 60}
    trace = trace_of(*FORWARD_PASS, *BACKWARD_PASS, held=held, held_parts=split, host_bytes=77)
    peak = peak_of(trace)
    assert peak.parts == Parts(300, 200, 60, skeletals=110, transients=1000, buffers=5)
    assert peak.host_bytes == 77
    assert peak.parts.total == trace.peak() + sum(block.size for block in held)


@pytest.mark.parametrize("rounding", [1, 512])
def test_the_parts_add_up_to_the_traces_peak(rounding):
    trace = Trace(Header("profile", rounding=rounding), PHASES, (*FORWARD_PASS, *BACKWARD_PASS))
    assert peak_of(trace).parts.total == trace.peak()
