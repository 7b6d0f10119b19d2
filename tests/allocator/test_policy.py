"""Which request gets which bytes: the matching rule, occupancy, streams, recording, the budget."""

import ctypes

import pytest

from megatron_memo.allocator import library
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import PlanEntry

A, B, C, D, E = 128, 256, 384, 512, 640  # sizes; each also is the offset of its entry below
ONE_OF_EACH = [A, B, C, D, E]


def replaying(alone, entries, arena=4096):
    alone.load_plan([PlanEntry(*entry) for entry in entries], arena)
    alone.replay()
    alone.begin_iteration()
    alone.enter(0)
    return alone


def spread(sizes, phase=0):
    """Entries that never share bytes: the first at 0, the next at 1024, ..."""
    return [(phase, size, 0, 1024 * k) for k, size in enumerate(sizes)]


@pytest.fixture
def five(alone):
    return replaying(alone, spread(ONE_OF_EACH), 8192)


def at(*positions):
    return [None if p is None else 1024 * p for p in positions]


def test_requests_in_the_planned_order_get_the_planned_bytes(five):
    assert five.ask(A, B, C, D, E) == at(0, 1, 2, 3, 4)
    assert five.stats().hit_rate == 1.0


def test_an_extra_request_of_a_size_just_taken_goes_native_and_the_rest_hit(five):
    assert five.ask(A, B, B, C, D, E) == at(0, 1, None, 2, 3, 4)
    assert five.stats().miss_occupied == 1


def test_an_extra_request_gets_the_bytes_of_one_of_the_last_two_if_they_are_free(five):
    first = five.malloc(A)
    second = five.malloc(B)
    five.free(first, second)
    assert five.ask(A, B, C) == at(0, 1, 2)


def test_a_third_one_back_is_out_of_reach(five):
    three = [five.malloc(size) for size in (A, B, C)]
    five.free(*three)
    assert five.ask(A, D) == at(None, 3)
    assert five.stats().miss_unknown == 1


def test_missing_requests_are_skipped(five):
    assert five.ask(A, D, E) == at(0, 3, 4)


def test_two_that_swapped_places_both_hit(five):
    assert five.ask(B, A, C, D, E) == at(1, 0, 2, 3, 4)


def test_a_resized_request_goes_native_and_the_rest_hit(five):
    assert five.ask(A, B + 1, C, D, E) == at(0, None, 2, 3, 4)


def test_a_request_beyond_the_last_entry_goes_native(five):
    assert five.ask(A, B, C, D, E, 77) == at(0, 1, 2, 3, 4, None)


def test_another_streams_request_never_gets_the_arenas_bytes(five):
    assert five.ask(A, stream=3) == [None]
    assert five.ask(A) == at(0)


def test_looking_ahead_stops_at_the_phases_end(alone):
    replaying(alone, [*spread([A]), (1, B, 0, 1024)])
    assert alone.ask(B) == [None]
    alone.enter(1)
    assert alone.ask(B) == [1024]


def test_the_previous_two_are_of_the_same_phase(alone):
    replaying(alone, [*spread([A]), (1, B, 0, 1024)])
    alone.free(alone.malloc(A))
    alone.enter(1)
    assert alone.ask(A) == [None]


def test_each_phase_starts_at_its_own_entries_whatever_the_one_before_left_out(alone):
    replaying(alone, [*spread([A, B, C]), (1, A, 0, 3072), (1, B, 0, 4096)], 8192)
    assert alone.ask(A) == [0]
    alone.enter(1)
    assert alone.ask(A, B) == [3072, 4096]


def test_a_phase_entered_again_goes_on_where_it_was_left(alone):
    replaying(alone, [(0, A, 0, 0), (1, C, 0, 2048), (0, A, 0, 1024)])
    assert alone.ask(A) == [0]
    alone.enter(1)
    alone.enter(0)
    assert alone.ask(A) == [1024]


def test_entries_of_a_visit_are_met_in_that_visit_whatever_the_one_before_left_out(alone):
    replaying(alone, [(0, A, 0, 0, 0), (0, B, 0, 1024, 0), (0, A, 0, 2048, 1), (1, C, 0, None, 0)])
    assert alone.ask(A) == [0]
    alone.enter(0)  # no new visit: it is in there
    alone.enter(1)
    alone.enter(0)
    assert alone.ask(A, B) == [2048, None]
    alone.enter(1)
    alone.enter(0)  # a third visit, which the plan does not know
    assert alone.ask(A) == [None]
    alone.begin_iteration()
    alone.enter(0)
    assert alone.ask(B) == [1024]


def test_entries_of_any_visit_stand_in_where_a_visit_has_none(alone):
    replaying(alone, [(0, A, 0, 0, 1), (0, B, 0, 1024)])
    assert alone.ask(B) == [1024]
    alone.enter(1)
    alone.enter(0)
    assert alone.ask(A) == [0]


def test_the_next_iteration_starts_at_the_plans_start(five):
    blocks = [five.malloc(size) for size in (A, 77, C)]
    five.free(*blocks)
    five.end_iteration()
    five.reset_stats()
    five.begin_iteration()
    five.enter(0)
    assert five.ask(*ONE_OF_EACH) == at(0, 1, 2, 3, 4)
    assert five.stats().hit_rate == 1.0


def test_an_iteration_that_broke_off_needs_no_end(five):
    five.free(*[five.malloc(size) for size in (A, B)])
    five.begin_iteration()
    five.enter(0)
    assert five.ask(A, B) == at(0, 1)


def test_bytes_in_use_are_never_handed_out_whatever_the_plan_says(alone):
    replaying(alone, [(0, A, 0, 0), (0, B, 0, 64), (0, C, 0, 128), (0, D, 0, 0)])
    first = alone.malloc(A)
    assert alone.ask(B) == [None]  # overlaps the end of the first
    assert alone.ask(C) == [128]  # touches it
    assert alone.ask(D) == [None]
    alone.free(first)
    assert alone.stats().miss_occupied == 2


def test_a_block_kept_beyond_the_iterations_end_keeps_its_bytes(five):
    kept = five.malloc(A)
    five.end_iteration()
    five.begin_iteration()
    five.enter(0)
    assert five.ask(A, B) == at(None, 1)
    five.free(kept)
    five.begin_iteration()
    five.enter(0)
    assert five.ask(A) == at(0)


def test_native_entries_are_left_to_the_native_allocator_and_keep_the_cursor_right(alone):
    replaying(alone, [(0, A, 0, None), (0, A, 0, 0), (0, A, 7, None)])
    assert alone.ask(A, A) == [None, 0]
    assert alone.ask(A, stream=7) == [None]
    stats = alone.stats()
    assert (stats.native_entries, stats.hits, stats.requests) == (2, 1, 3)
    assert stats.hit_rate == 1.0


def test_requests_and_entries_below_the_filter_are_left_out_of_both(alone):
    alone.set_filter(B)
    replaying(alone, spread([A, B, A, C]))
    assert alone.ask(A, B, A, A, C) == at(None, 1, None, None, 3)
    stats = alone.stats()
    assert (stats.miss_small, stats.requests, stats.hit_rate) == (3, 2, 1.0)
    assert stats.native_mallocs == 0


def test_nothing_is_planned_before_the_first_marker_or_after_the_end(five):
    five.end_iteration()
    assert five.ask(A) == [None]
    five.enter(0)  # evaluation runs the same layers
    assert five.ask(A) == [None]
    five.begin_iteration()
    assert five.ask(A) == [None]
    five.enter(0)
    assert five.ask(A) == [0]
    stats = five.stats()
    assert (stats.outside, stats.requests, stats.native_mallocs) == (3, 1, 3)


def test_a_thread_is_planned_once_it_has_pushed_a_marker(five):
    bare = five.raw.alone_malloc_on_thread(A, 0, -1)
    assert five.offset(bare) is None
    assert five.offset(five.raw.alone_malloc_on_thread(A, 0, 0)) == 0
    assert five.stats().miss_thread == 1


def test_off_leaves_blocks_alive_and_frees_them_later(five):
    block = five.malloc(A)
    five.off()
    assert five.ask(B) == [None]
    assert five.stats().arena_blocks == 1
    assert five.free(block)
    assert five.stats().arena_blocks == five.stats().arena_live == 0


def test_a_free_of_arena_bytes_that_are_no_block_is_counted_and_harmless(five):
    block = five.malloc(A)
    assert not five.free(block + 64)
    assert five.free(block)
    assert not five.free(block)
    assert five.stats().unknown_frees == 2
    assert five.ask(B) == at(1)


def test_live_and_peak_bytes_of_the_arena_are_rounded_to_the_alignment(alone):
    replaying(alone, [(0, 100, 0, 0), (0, 100, 0, 128)])
    first, second = alone.malloc(100), alone.malloc(100)
    alone.free(first)
    stats = alone.stats()
    assert (stats.arena_live, stats.arena_peak, stats.arena_blocks) == (128, 256, 1)
    alone.free(second)
    alone.reset_stats()
    assert alone.stats().arena_peak == 0


def test_the_block_around_an_address_is_found(five):
    block = five.malloc(A)
    offset, length = ctypes.c_uint64(), ctypes.c_uint64()
    found = five.raw.alone_block_around
    for inside in (0, 1, A - 1):
        assert found(block + inside, ctypes.byref(offset), ctypes.byref(length))
        assert (offset.value, length.value) == (0, A)
    assert not found(block + A, ctypes.byref(offset), ctypes.byref(length))


# ---- plans that are not right


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ((0, A, 0, 63), "entry 1"),
        ((0, A, 0, 4096), "within the arena of 4096 bytes"),
        ((0, 4097, 0, 0), "entry 1"),
        ((0, A, 0, 2**64 - 64), "entry 1"),
        ((0, A, 5, 0), "of stream 0"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_and_there_is_no_plan(alone, entry, says):
    with pytest.raises(AllocatorError, match=says):
        alone.load_plan([PlanEntry(0, A, 0, 0), PlanEntry(*entry)], 4096)
    alone.replay()
    alone.begin_iteration()
    alone.enter(0)
    assert alone.ask(A) == [None]


@pytest.mark.parametrize("bad", [(0, -1, 0, 0), (2**40, A, 0, 0), (0, A, 0, -64)])
def test_numbers_out_of_range_are_refused(alone, bad):
    with pytest.raises(AllocatorError, match="out of range"):
        alone.load_plan([PlanEntry(*bad)], 4096)


def test_the_filter_is_set_only_while_off(five):
    with pytest.raises(AllocatorError, match="while the allocator is off"):
        five.set_filter(64)


# ---- side streams


def test_bytes_a_side_stream_used_are_waited_for_before_they_are_handed_out_again(alone):
    replaying(alone, [(0, A, 0, 0), (0, B, 0, 0), (0, C, 0, 0)])
    block = alone.malloc(A)
    for stream in (5, 6, 5, 0):
        assert alone.raw.alone_use(block, stream)
    assert alone.stream_log(0) == []
    alone.free(block)
    assert alone.stream_log(0) == [5, 6]  # each once, and not the arena's own
    assert alone.stream_log(1) == []  # nobody waits before the bytes are wanted
    again = alone.malloc(B)
    assert alone.offset(again) == 0
    assert sorted(alone.stream_log(1)) == sorted(alone.stream_log(2)) == [5, 6]
    assert alone.stats().stream_waits == 2
    alone.free(again)
    alone.malloc(C)
    assert len(alone.stream_log(1)) == 2  # settled once for all


def test_neighbours_of_a_side_streams_bytes_do_not_wait(alone):
    replaying(alone, [(0, A, 0, 128), (0, A, 0, 0), (0, A, 0, 256)])
    block = alone.malloc(A)
    alone.raw.alone_use(block, 5)
    alone.free(block)
    assert alone.ask(A, A) == [0, 256]
    assert alone.stream_log(1) == []


def test_bytes_that_cover_several_side_streams_blocks_wait_for_all_of_them(alone):
    replaying(alone, [(0, A, 0, 0), (0, B, 0, 128), (0, 320, 0, 64)])
    for size, stream in ((A, 5), (B, 6)):
        block = alone.malloc(size)
        alone.raw.alone_use(block, stream)
        alone.free(block)
    assert alone.ask(320) == [64]
    assert sorted(alone.stream_log(1)) == [5, 6]


@pytest.mark.parametrize(("record", "wait"), [(1, 0), (0, 1)])
def test_bytes_whose_side_stream_cannot_be_waited_for_stay_out_of_use(alone, record, wait):
    replaying(alone, [(0, A, 0, 0), (0, B, 0, 0), (0, C, 0, 1024)])
    block = alone.malloc(A)
    alone.raw.alone_use(block, 5)
    alone.raw.alone_break_streams(record, wait)
    alone.free(block)
    assert alone.ask(B, C) == [None, 1024]
    assert alone.stats().miss_occupied == 1


def test_a_side_streams_use_of_what_is_no_block_is_told(five):
    assert not five.raw.alone_use(five.raw.alone_base(), 5)


# ---- recording


def events(raw):
    return [tuple(event)[:4] for event in raw.tolist()]


def test_a_recording_holds_requests_frees_and_markers_in_order(alone):
    alone.start_recording()
    alone.begin_iteration()
    alone.enter(3)
    block = alone.malloc(A)
    kept = alone.malloc(B)
    alone.enter(4)
    alone.free(block)
    alone.end_iteration()
    raw = alone.stop_recording()
    assert events(raw) == [
        (library.ITERATION_BEGIN, -1, 0, 0),
        (library.PHASE, 3, 0, 0),
        (library.MALLOC, 3, 0, A),
        (library.MALLOC, 3, 1, B),
        (library.PHASE, 4, 0, 0),
        (library.FREE, 4, 0, 0),
        (library.ITERATION_END, -1, 0, 0),
    ]
    alone.free(kept)


def test_what_would_not_be_planned_is_not_recorded(alone):
    alone.set_filter(B)
    alone.start_recording()
    alone.malloc(B)
    alone.begin_iteration()
    alone.malloc(B)
    alone.enter(0)
    alone.malloc(A)
    alone.raw.alone_malloc_on_thread(B, 0, -1)
    alone.end_iteration()
    alone.malloc(B)
    assert [kind for kind, *_ in events(alone.stop_recording())] == [
        *(library.ITERATION_BEGIN, library.PHASE, library.ITERATION_END)
    ]


def test_frees_of_blocks_that_the_recording_does_not_know_are_dropped(alone):
    def record_one(freed_first):
        alone.start_recording()
        alone.begin_iteration()
        alone.enter(0)
        alone.free(*freed_first)
        block = alone.malloc(A)
        return block, alone.stop_recording()

    before = alone.malloc(B)
    block, raw = record_one([before])
    assert library.FREE not in raw["kind"]
    _, raw = record_one([block])  # its number was given out in the first recording
    assert library.FREE not in raw["kind"]


def test_a_recording_is_taken_once(alone):
    with pytest.raises(AllocatorError, match="no recording"):
        alone.stop_recording()


# ---- the budget and its error


def test_the_budget_counts_what_lives_in_every_mode(alone):
    first = alone.malloc(1000)
    alone.set_budget(1500)
    assert alone.malloc(501) == 0
    second = alone.malloc(500)
    assert alone.malloc(1) == 0
    alone.free(first)
    assert alone.malloc(1000)
    alone.free(second)
    stats = alone.stats()
    assert (stats.device_used, stats.device_peak) == (1000, 1500)
    alone.set_budget(None)
    assert alone.malloc(10**6)


@pytest.mark.parametrize("nbytes", [0, -1, 2**64])
def test_a_budget_that_is_none_is_refused(alone, nbytes):
    with pytest.raises(AllocatorError, match="must be above 0"):
        alone.set_budget(nbytes)


def test_the_error_names_the_largest_holders_with_their_phases(alone):
    alone.set_budget(64 << 20)
    replaying(alone, [(0, 1 << 20, 0, 0)], 2 << 20)
    alone.name_phases({0: "layer 3 forward"})
    alone.malloc(1 << 20)
    alone.enter(9)
    for _ in range(3):
        alone.malloc(2 << 20)
    alone.end_iteration()
    alone.malloc(5 << 20)
    text = ctypes.create_string_buffer(2000)
    alone.raw.alone_out_of_memory(60 << 20, 2 << 20, text, len(text))
    said = text.value.decode()
    assert "Tried to allocate 60.00 MiB. The device budget is 64.00 MiB" in said
    assert "11.00 MiB are in use and 53.00 MiB are free" in said
    assert "the arena has 2.00 MiB of that, 1.00 MiB of it live" in said
    assert said.endswith(
        "Top holders: 3 x 2.00 MiB (phase 9), 1 x 5.00 MiB (outside an iteration), "
        "1 x 1.00 MiB (layer 3 forward)."
    )
