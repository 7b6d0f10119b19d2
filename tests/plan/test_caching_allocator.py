"""The simulation of PyTorch's caching allocator: its rules, one by one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.plan.caching_allocator import (
    MIB,
    CachingAllocator,
    replay,
    replay_until_steady,
)

both = pytest.mark.parametrize("expandable", [False, True])


@both
def test_small_requests_share_a_segment_of_2_mib(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    blocks = [allocator.allocate(1) for _ in range(4096)]
    assert allocator.usage().reserved == 2 * MIB
    assert allocator.usage().rounded_peak == 2 * MIB
    allocator.allocate(1)
    assert allocator.usage().reserved == 4 * MIB
    assert len({b.address for b in blocks}) == 4096


@pytest.mark.parametrize(
    ("size", "native", "expandable"),
    [
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB, 12 * MIB, 20 * MIB),
        (31 * MIB, 32 * MIB, 40 * MIB),
    ],
)
def test_segment_sizes(size, native, expandable):
    assert replay([(0, 1, size)]).reserved == native
    assert replay([(0, 1, size)], expandable_segments=True).reserved == expandable


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB)
    allocator.allocate(MIB + 1)  # the rest of the first segment went with the 19 MiB
    assert allocator.usage().reserved == 40 * MIB
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(18 * MIB)
    allocator.allocate(2 * MIB)
    assert allocator.usage().reserved == 20 * MIB


def test_freed_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for k in (1, 3, 0, 2):
        allocator.free(blocks[k])
    allocator.allocate(20 * MIB)
    assert allocator.usage().reserved == 20 * MIB


def test_an_expandable_segment_grows_at_its_end_where_a_native_one_fragments():
    steps = [(k, k + 1, (20 + k) * MIB) for k in range(10)]
    native, expandable = replay(steps), replay(steps, expandable_segments=True)
    assert native.reserved == (20 + 22 + 24 + 26 + 28 + 30) * MIB
    assert expandable.reserved == 40 * MIB


@both
def test_a_second_iteration_reuses_what_the_first_reserved(expandable):
    trace = [(k, k + 3, (1 + k % 7) * MIB) for k in range(50)]
    once = replay(trace, expandable_segments=expandable)
    assert replay(trace, expandable_segments=expandable, times=3).reserved >= once.reserved
    assert replay(trace[:1], expandable_segments=expandable, times=9).reserved == 2 * MIB


@both
def test_double_free_and_empty_requests_are_refused(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    block = allocator.allocate(100)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)
    with pytest.raises(ValueError, match="at least 1"):
        allocator.allocate(0)


@both
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB)), max_size=60))
def test_live_blocks_never_overlap_and_reserved_covers_them(expandable, steps):
    allocator = CachingAllocator(expandable_segments=expandable)
    live = []
    for allocate, size in steps:
        if allocate or not live:
            live.append((allocator.allocate(size), size))
        else:
            allocator.free(live.pop(size % len(live))[0])
        for small in (False, True):
            spans = sorted((b.address, b.size, s) for b, s in live if b.small == small)
            assert all(size <= block for _, block, size in spans)
            assert all(a + length <= b for (a, length, _), (b, _, _) in itertools.pairwise(spans))
        assert sum(b.size for b, _ in live) <= allocator.reserved
        assert allocator.alive == sum(-(-s // 512) * 512 for _, s in live)


@both
def test_rounds_go_on_until_nothing_more_is_reserved(expandable):
    windows = [[(0, 2, 30 * MIB), (1, 3, 50 * MIB)], [(0, 1, 60 * MIB)]]
    usage, rounds = replay_until_steady(windows, expandable_segments=expandable)
    assert 2 <= rounds < 8
    longer = replay_until_steady(windows, expandable_segments=expandable, most=rounds - 1)
    assert longer[0].reserved == usage.reserved
    assert replay_until_steady(windows, expandable_segments=expandable, most=1)[1] == 1
