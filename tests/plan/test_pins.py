"""The canonical search around buffers whose offsets are given, against trying everything."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.plan import native
from megatron_memo.plan.canonical import Outcome, Search, Techniques
from megatron_memo.plan.instances import perfect
from megatron_memo.plan.reduced import reduce_problem
from megatron_memo.plan.verify import verify_layout

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler here")

CASES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.integers(-8, 5)),
    min_size=2,
    max_size=6,
)


def apart(a, b):
    """Buffers (lower, upper, size, offset) that share no bytes at any time."""
    return a[1] <= b[0] or b[1] <= a[0] or a[3] + a[2] <= b[3] or b[3] + b[2] <= a[3]


def fits(buffers, capacity, done=()):
    """Whether the buffers with a negative offset can be placed, by trying every offset."""
    if not buffers:
        return True
    lower, upper, size, _ = buffers[0]
    return any(
        all(apart((lower, upper, size, at), other) for other in done)
        and fits(buffers[1:], capacity, [*done, (lower, upper, size, at)])
        for at in range(capacity - size + 1)
    )


@given(CASES, st.integers(4, 9), st.integers(0, 2**10 - 1))
@settings(max_examples=300, deadline=None)
def test_found_exactly_when_the_rest_can_be_placed_around_the_pins(cases, capacity, mask):
    buffers = [(start, start + life, size, at) for start, life, size, at in cases if size <= 4]
    pinned = [b for b in buffers if b[3] >= 0 and b[3] + b[2] <= capacity]
    loose = [b for b in buffers if b[3] < 0]
    if not all(apart(a, b) for a, b in itertools.combinations(pinned, 2)):
        pinned = pinned[:1]
    buffers = [*pinned, *loose]
    if not buffers:
        return
    columns = [list(column) for column in zip(*buffers, strict=True)]
    problem = reduce_problem(*columns[:3], divide_sizes=False)
    pins = [max(-1, at) for at in columns[3]]
    with Search(problem, capacity, pins=pins, techniques=Techniques.from_mask(mask)) as search:
        result = search.run()
    assert (result.outcome is Outcome.FOUND) == fits(loose, capacity, pinned)
    if result.offsets is not None:
        names = [str(k) for k in range(len(buffers))]
        verify_layout(names, *columns[:3], result.offsets, capacity=capacity)
        assert all(pin in (-1, at) for pin, at in zip(pins, result.offsets, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_part_of_a_known_layout_pinned_leads_back_to_one(seed):
    columns = [list(column) for column in zip(*perfect(60, 40, 128, seed), strict=True)]
    problem = reduce_problem(*columns, divide_sizes=False)
    with Search(problem, 128) as search:
        whole = search.run().offsets
    pins = [at if k % 3 else -1 for k, at in enumerate(whole)]
    with Search(problem, 128, pins=pins) as search:
        again = search.run().offsets
    verify_layout([str(k) for k in range(60)], *columns, again, capacity=128)
    assert all(again[k] == at for k, at in enumerate(pins) if at >= 0)
