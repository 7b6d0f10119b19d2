"""From raw events to a trace."""

import numpy as np
import pytest

from megatron_memo.allocator import library as abi
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.record import to_trace
from megatron_memo.phases import FORWARD, LAYER, START, Phase
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, TraceError

HEADER = Header("allocator", device="cpu", rounding=64)
LAYER_1 = Phase(LAYER, FORWARD, 0, 1)
PHASES = {7: LAYER_1, 3: START}

BEGIN = (abi.ITERATION_BEGIN, -1, 0, 0, 0, 0)
END = (abi.ITERATION_END, -1, 0, 0, 0, 0)


def enter(number):
    return (abi.PHASE, number, 0, 0, 0, 0)


def malloc(block, size, phase=7, stream=0):
    return (abi.MALLOC, phase, block, size, stream, 0)


def free(block, phase=7):
    return (abi.FREE, phase, block, 0, 0, 0)


def raw(*events):
    return np.array(list(events), dtype=abi.EVENT)


def trace(*events):
    return to_trace(raw(*events), PHASES, HEADER)


def test_events_become_a_trace_with_the_phases_that_occur():
    made = trace(BEGIN, enter(3), malloc(0, 64, 3), enter(7), malloc(1, 100), free(0), END)
    assert made.phases == (START, LAYER_1)
    assert made.events == (
        *(Enter(0), Malloc(0, 64, 0, ""), Enter(1), Malloc(1, 100, 0, ""), Free(0)),
    )
    assert made.header is HEADER


def test_frees_after_the_iterations_end_leave_a_block_that_outlives_the_window():
    made = trace(BEGIN, enter(7), malloc(0, 64), END, free(0))
    assert made.blocks()[0].upper is None


def test_the_last_whole_iteration_counts_and_what_lives_into_it_is_held():
    first = (BEGIN, enter(7), malloc(0, 64), malloc(1, 128), free(1), malloc(2, 256), END)
    second = (BEGIN, enter(7), malloc(3, 512), free(0), END)
    broken_off = (BEGIN, enter(7), malloc(4, 1))
    made = trace(*first, *second, *broken_off)
    assert [block.id for block in made.held] == [0, 2]
    assert [block.id for block in made.blocks()] == [3]


@pytest.mark.parametrize("events", [(), (BEGIN, enter(7)), (END,)])
def test_a_recording_without_a_whole_iteration_is_refused(events):
    with pytest.raises(AllocatorError, match="no whole iteration"):
        trace(*events)


def test_a_phase_that_nobody_named_is_refused():
    with pytest.raises(AllocatorError, match="phase 9"):
        trace(BEGIN, enter(9), malloc(0, 64, 9), END)


def test_an_iteration_without_requests_is_refused():
    with pytest.raises(TraceError, match="empty"):
        trace(BEGIN, enter(7), END)
