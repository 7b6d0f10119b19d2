"""What a depth in steps leaves on the device, counted by hand and by its limits."""

from dataclasses import replace

import pytest

from megatron_memo.config import MemoConfig
from megatron_memo.estimate import memory
from megatron_memo.estimate.in_flight import InFlight
from megatron_memo.estimate.tensors import Sizes
from megatron_memo.layer.chunks import Fate

SWAPPED = [(0.5, Fate.SWAP), (0.5, Fate.SWAP)]
HALF = [(0.5, Fate.SWAP), (0.5, Fate.RECOMPUTE)]


@pytest.fixture
def sizes(seven_b):
    """In halves of b*s*h/tp elements; statistics are left out."""
    units = Sizes.of(replace(seven_b, rope=False), 1)
    unit = units.hidden // 2
    return replace(
        units,
        **{name: getattr(units, name) // unit for name in vars(units)} | {"statistics": 0},
    )


def test_two_chunks_by_hand(sizes):
    """Steps: 0, 1 before the attention (2), 3, 4 after it. Of a chunk are saved 2 units before it
    (norm's output 0.5; q, k, v 1.5) and 5 after it; input and attention output are 1 unit each."""
    window = InFlight(sizes, SWAPPED, depth=1)
    assert window.forward(4) == 2 * (5 + 5)
    assert window.forward(2) == 2 * 2
    assert window.forward(0) == 2 * (2 + 5)  # of the layer before its last chunk
    # Last chunk: its own, what the chunk before it reads, and the attention output.
    assert window.backward(4) == 2 * (5 + 5 + 1)
    # Attention: its output and q, k, v; for the step after it a norm's output and the input.
    assert window.backward(2) == 2 * (1 + 3 + 0.5 + 1)
    # First chunk: a norm's output and the input; of the layer below its last chunk and its output.
    assert window.backward(0) == 2 * (0.5 + 1 + 5 + 1)


def test_recomputed_chunks_travel_with_input_and_output_only(sizes):
    window = InFlight(sizes, HALF, depth=0)
    assert window.forward(4) == 0 and window.forward(3) == 2 * 5
    assert window.backward(4) == 2 * 2  # what it is recomputed from
    assert window.backward(3) == 2 * (2 + 5)


def test_at_the_turn_rows_are_there_as_far_as_the_depth_reaches(sizes):
    rows = [InFlight(sizes, SWAPPED, depth).rows_at_turn() for depth in (3, 4, 5)]
    assert rows == [0, 2 * 1.5, 2 * 3]


@pytest.mark.parametrize("chunks", [SWAPPED, HALF])
def test_more_depth_never_leaves_less(sizes, chunks):
    for step in range(5):
        for kind in ("forward", "backward"):
            held = [getattr(InFlight(sizes, chunks, depth), kind)(step) for depth in range(12)]
            assert held == sorted(held)


def test_memory_grows_with_the_depth_up_to_about_that_of_two_layers(seven_b):
    def total(depth, resident):
        return memory.memo(seven_b, MemoConfig(0.5, 8, resident), 64, depth=depth).parts.total

    free = [total(depth, resident=0) for depth in (1, 4, 17, 34)]
    assert free == sorted(free) and free[0] < free[-1]
    assert free[0] < total(None, resident=0) < 1.2 * free[-1]
    resident = [total(depth, resident=2) for depth in (1, 4, 17, 34)]
    assert resident == sorted(resident) and resident[0] > free[0]
