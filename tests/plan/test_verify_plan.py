"""The verifier of plans: right ones pass, and a wrong one never does."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_memo.phases import FORWARD, LAYER, START, Phase
from megatron_memo.plan.made_up_traces import SIDE_STREAM, Shape, training
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.verify_plan import (
    WrongPlanError,
    fingerprint_differences,
    verify_against,
    verify_plan,
)
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, Trace

QUICK = Search(time_limit=20, workers=1, use_cp_sat=False)


@pytest.fixture(scope="module")
def trace():
    return training(Shape(3, 2, unit=1 << 22))


@pytest.fixture(scope="module")
def plan(trace):
    return make_plan([Source("train", "11", trace)], QUICK).plan


def with_entries(plan, entries):
    window = dataclasses.replace(plan.windows[0], entries=tuple(entries))
    return dataclasses.replace(plan, windows=(window,))


def changed(plan, k, **change):
    entries = list(plan.windows[0].entries)
    entries[k] = entries[k]._replace(**change)
    return with_entries(plan, entries)


def check(plan, trace):
    verify_plan(plan)
    verify_against(plan, trace, "11")


@st.composite
def traces(draw):
    """Any order of requests and frees, on two streams, in two phases."""
    events, live = [], []
    for number in range(draw(st.integers(1, 25))):
        step = draw(st.sampled_from(("malloc", "malloc", "free", "enter")))
        if step == "free" and live:
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif step == "enter":
            events.append(Enter(draw(st.integers(0, 1))))
        else:
            stream = draw(st.sampled_from((0, 0, 0, SIDE_STREAM)))
            events.append(Malloc(number, draw(st.integers(1, 5000)), stream, "x"))
            live.append(number)
    # At least one request that can be planned.
    events += [Malloc(1000, 100_000, 0, "last"), Free(1000)]
    phases = (START, Phase(LAYER, FORWARD, 0, 1))
    return Trace(Header("profile", fingerprint={"layers": 1}), phases, tuple(events))


@given(traces())
@settings(max_examples=40, deadline=None)
def test_any_plan_verifies_by_itself_and_against_its_trace(trace):
    plan = make_plan([Source("t", "1", trace)], QUICK).plan
    seen = verify_plan(plan)
    assert seen.peak == plan.arena and seen.most_alive <= plan.bound
    assert seen.planned + seen.native == sum(isinstance(e, Malloc) for e in trace.events)
    assert verify_against(plan, trace, "1") == verify_against(plan, trace, "other") == "t"


@given(traces(), st.integers(2, 50))
@settings(max_examples=25, deadline=None)
def test_sizes_times_k_need_an_arena_times_k(trace, k):
    events = tuple(
        e._replace(size=e.size * k) if isinstance(e, Malloc) else e for e in trace.events
    )
    header = dataclasses.replace(trace.header, rounding=1)
    small = make_plan([Source("t", "1", dataclasses.replace(trace, header=header))], QUICK).plan
    large = make_plan(
        [Source("t", "1", dataclasses.replace(trace, header=header, events=events))], QUICK
    ).plan
    assert (large.arena, large.bound) == (small.arena * k, small.bound * k)


@given(traces(), st.integers(1, 5000))
@settings(max_examples=25, deadline=None)
def test_one_more_block_never_lowers_the_bound(trace, size):
    events = (*trace.events, Free(2000))
    more = dataclasses.replace(trace, events=(Malloc(2000, size, 0, "more"), *events))
    before = make_plan([Source("t", "1", trace)], QUICK).plan
    after = make_plan([Source("t", "1", more)], QUICK).plan
    assert after.bound >= before.bound


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_block_moved_into_another_is_found(plan, random):
    planned = [(k, e) for k, e in enumerate(plan.windows[0].entries) if e.offset is not None]
    k, entry = random.choice(planned)
    meets = [e for j, e in planned if e.lower < entry.upper and entry.lower < e.upper and j != k]
    assume(meets)
    other = random.choice(meets)
    with pytest.raises(WrongPlanError, match=r"overlap|above the capacity"):
        verify_plan(changed(plan, k, offset=other.offset))


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_an_entry_dropped_changed_or_swapped_is_found(plan, trace, random):
    entries = list(plan.windows[0].entries)
    k = random.randrange(len(entries) - 1)
    wrong = [
        with_entries(plan, entries[:k] + entries[k + 1 :]),
        with_entries(plan, [*entries[:k], entries[k + 1], entries[k], *entries[k + 2 :]]),
        changed(plan, k, size=entries[k].size + 1),
        changed(plan, k, stream=entries[k].stream + 1),
        changed(plan, k, upper=None if entries[k].upper is not None else 10**6),
        changed(plan, k, lower=entries[k].lower + 1),
        changed(plan, k, phase=(entries[k].phase + 1) % len(trace.phases)),
        changed(plan, k, offset=None if entries[k].offset is not None else 0),
    ]
    for other in wrong:
        with pytest.raises(WrongPlanError):
            check(other, trace)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(bound=0), "bound"),
        (dict(bound=2**40), "bound"),
        (dict(arena=1), "capacity"),
        (dict(windows=()), "no window"),
        (dict(smallest=2**30), "can't be planned"),
    ],
)
def test_a_header_that_contradicts_the_entries_is_found(plan, change, says):
    with pytest.raises(WrongPlanError, match=says):
        verify_plan(dataclasses.replace(plan, **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(fingerprint={"layers": 4}), "something else"),
        (dict(device="cpu"), "device"),
        (dict(rounding=64), "rounding"),
        (dict(world_size=8), "world size"),
        (dict(rank=3, world_size=1), "rank"),
    ],
)
def test_a_trace_of_something_else_is_refused_by_name(plan, trace, change, says):
    other = dataclasses.replace(trace, header=dataclasses.replace(trace.header, **change))
    with pytest.raises(WrongPlanError, match=says):
        verify_against(plan, other, "other file")


def test_a_misaligned_block_is_found(plan):
    last = max(
        (e.offset + e.size, k)
        for k, e in enumerate(plan.windows[0].entries)
        if e.offset is not None
    )[1]
    offset = plan.windows[0].entries[last].offset - 64
    with pytest.raises(WrongPlanError, match="no multiple of 512"):
        verify_plan(changed(plan, last, offset=offset))


def test_a_trace_with_one_more_request_is_not_covered(plan, trace):
    more = dataclasses.replace(trace, events=(*trace.events, Malloc(10**6, 4096, 0, "more")))
    with pytest.raises(WrongPlanError, match="has no entry"):
        verify_against(plan, more, "other file")


def test_a_trace_with_one_request_less_is_not_what_the_plan_is_for(plan, trace):
    events = tuple(
        Enter(0) if isinstance(e, Malloc) and e.what == "kept state" else e for e in trace.events
    )
    less = dataclasses.replace(trace, events=events)
    window = plan.windows[0]
    assert window.entries[-1].offset is None
    with pytest.raises(WrongPlanError, match=f"{len(window.entries)} entries for the trace's"):
        verify_against(plan, less, "other file")


def test_other_phases_are_found(plan, trace):
    phases = (START, Phase(LAYER, FORWARD, 7, 7), *trace.phases[2:])
    with pytest.raises(WrongPlanError, match="phases"):
        verify_against(plan, dataclasses.replace(trace, phases=phases), "other file")


def test_entries_out_of_order_are_found_without_a_trace(plan):
    entries = list(plan.windows[0].entries)
    entries[3], entries[4] = entries[4], entries[3]
    with pytest.raises(WrongPlanError, match="request 4 is out of order"):
        verify_plan(with_entries(plan, entries))


def test_differences_of_fingerprints_are_words():
    found = fingerprint_differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 6})
    assert found == [
        "b was 2 and is 5",
        "c was 3 and is not there now",
        "d is 6 and was not there",
    ]
    assert fingerprint_differences({"a": 1}, {"a": 1}) == []
