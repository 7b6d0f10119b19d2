"""The ratio's program: nothing on a grid is better, limits are named right, more is never worse."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.plan.ratio import (
    LAYERS,
    Depth,
    Disk,
    Limit,
    Link,
    NoRoom,
    Problem,
    Times,
    paper_program,
    solve,
)
from megatron_memo.plan.ratio.schedule import both_share, passes

GIB = 1 << 30
# What the model's whole numbers may lose of a step.
RESOLUTION = 1e-7


def seven_b(**other):
    """7B at 1M tokens on one of 8 GPUs: attention is nearly all of the time. Seconds are round."""
    values = dict(
        rows=131072,
        chunks=8,
        forward=Times(0.05, 10.0, 0.1),
        backward=Times(0.1, 25.0, 0.2),
        recompute=0.12,
        always=2 * GIB,
        others=14 * GIB,
        link=Link(16e9, 16e9),
        layers=32,
        resident=2,
        host=256 * GIB,
    )
    return Problem(**(values | other))


# ---- the grid, written without a look at the solver's own formulas


def grid(problem):
    """The shortest step: every decision tried, each requirement as it is said in words."""
    spills = range(problem.always + problem.others + 1) if problem.disk else (0,)
    return min(
        one(problem, swapped, spilled, depth)
        for swapped in range(problem.rows + 1)
        for spilled, depth in product(spills, problem.depths)
    )


def one(problem, swapped, spilled, depth):
    """Seconds of a step, or infinity where the decision does not fit."""
    n = problem.rows
    layer = problem.always + problem.others * swapped / n
    kept = max(layer - spilled, 0.0)
    chunks = max(problem.chunks, 2) if 0 < swapped < n else problem.chunks
    if depth.groups is None:
        buffers = 2.0
    else:
        buffers = min(2.0, depth.groups / (chunks + 1 + chunks))
    swapping = problem.layers - problem.resident
    held = swapping if problem.held is None else problem.held
    if held * kept > problem.host * (1 + 1e-12):
        return math.inf
    if problem.disk and held * spilled > problem.disk.nbytes * (1 + 1e-12):
        return math.inf
    if problem.device is not None and buffers * layer > problem.device * (1 + 1e-12):
        return math.inf
    seconds = 0.0
    for times, extra, alone, both, disk_speed in (
        (problem.forward, 0.0, problem.link.d2h, problem.link.d2h_both, "write"),
        (
            problem.backward,
            problem.recompute * (n - swapped) / n,
            problem.link.h2d,
            problem.link.h2d_both,
            "read",
        ),
    ):
        meeting = problem.both_share * layer
        copies = (layer - meeting) / alone + meeting / (both or alone)
        token_wise = times.pre + times.post + extra
        # While attention runs, the buffers' content is what can move.
        hidden_by_attention = min(times.attention, copies * min(buffers, 1.0))
        wait = max(copies - hidden_by_attention - token_wise, 0.0)
        pass_seconds = token_wise + times.attention + wait
        if problem.disk:
            pass_seconds = max(pass_seconds, spilled / getattr(problem.disk, disk_speed))
        seconds += pass_seconds
    whole = problem.forward.total + problem.backward.total
    a_pass = swapping * seconds + problem.resident * whole
    return problem.passes * a_pass + problem.other_seconds


second = st.floats(0, 10).map(lambda value: round(value, 3))
speed = st.sampled_from([1.0, 3.0, 7.5, 20.0, 1e3])
times = st.builds(Times, second, second, second)


@st.composite
def problems(draw):
    layers = draw(st.integers(1, 4))
    resident = draw(st.integers(0, layers - 1))
    return Problem(
        rows=draw(st.integers(1, 5)),
        chunks=draw(st.integers(1, 3)),
        forward=draw(times),
        backward=draw(times),
        recompute=draw(second),
        always=draw(st.integers(0, 20)),
        others=draw(st.integers(0, 60)),
        link=Link(draw(speed), draw(speed), draw(st.none() | speed), draw(st.none() | speed)),
        layers=layers,
        resident=resident,
        host=draw(st.integers(0, 300)),
        held=draw(st.none() | st.integers(1, 6)),
        passes=draw(st.sampled_from([1.0, 4.5])),
        both_share=draw(st.sampled_from([0.0, 0.25])),
        other_seconds=draw(second),
        disk=draw(st.none() | st.builds(Disk, st.integers(0, 200), speed, speed)),
        device=draw(st.none() | st.integers(0, 120)),
        depths=draw(st.sampled_from([(LAYERS,), (LAYERS, Depth(1), Depth(3)), (Depth(2),)])),
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_decision_on_the_whole_grid_is_better(problem):
    best = grid(problem)
    if math.isinf(best):
        with pytest.raises(NoRoom):
            solve(problem)
        return
    choice = solve(problem)
    assert choice.step_seconds == pytest.approx(best, rel=RESOLUTION, abs=1e-9)
    held = problem.swapping if problem.held is None else problem.held
    spilled = choice.disk_bytes / held if held else 0
    own = one(problem, choice.rows, spilled, choice.depth)
    assert own == pytest.approx(choice.step_seconds, rel=1e-9, abs=1e-9), "it is what it says"
    assert choice.host_bytes <= problem.host or held == 0


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(["host", "device", "disk", "d2h", "h2d", "write", "read"]))
def test_more_memory_or_bandwidth_never_makes_a_step_longer(problem, what):
    if math.isinf(grid(problem)):
        return
    link, disk = problem.link, problem.disk
    if (
        what in ("device", "disk", "write", "read")
        and getattr(problem, "device" if what == "device" else "disk") is None
    ):
        return
    more = {
        "host": lambda: replace(problem, host=problem.host + 17),
        "device": lambda: replace(problem, device=problem.device + 9),
        "disk": lambda: replace(problem, disk=replace(disk, nbytes=disk.nbytes + 11)),
        "write": lambda: replace(problem, disk=replace(disk, write=disk.write * 1.7)),
        "read": lambda: replace(problem, disk=replace(disk, read=disk.read * 1.7)),
        "d2h": lambda: replace(problem, link=replace(link, d2h=link.d2h * 1.3)),
        "h2d": lambda: replace(problem, link=replace(link, h2d=link.h2d * 1.3)),
    }[what]()
    before, after = solve(problem).step_seconds, solve(more).step_seconds
    assert after <= before * (1 + RESOLUTION) + 1e-9


# ---- what binds


@pytest.mark.parametrize(
    ("other", "limit"),
    [
        (dict(), Limit.HOST),
        (dict(host=600 * GIB), Limit.COMPUTE),
        (dict(host=600 * GIB, link=Link(0.5e9, 16e9)), Limit.D2H),
        (dict(host=600 * GIB, link=Link(16e9, 0.25e9)), Limit.H2D),
        (dict(host=600 * GIB, device=8 * GIB), Limit.DEVICE),
        (dict(host=64 * GIB, disk=Disk(190 * GIB, 8e9, 8e9)), Limit.DISK_SPACE),
        (dict(host=61 * GIB, disk=Disk(600 * GIB, 1e9, 1e9)), Limit.DISK_SPEED),
    ],
    ids=lambda value: value.value if isinstance(value, Limit) else "",
)
def test_the_limit_that_binds_is_named_and_relaxing_it_helps(other, limit):
    choice = solve(seven_b(**other))
    assert choice.binds is limit
    if limit is Limit.COMPUTE:
        assert choice.ratio == 1.0
        assert all(relaxed.saves_without == 0 for relaxed in choice.relaxed)
        return
    assert choice.ratio < 1.0
    mine = next(relaxed for relaxed in choice.relaxed if relaxed.limit is limit)
    assert mine.saves_without >= mine.saves_with_a_tenth_more > 0


def test_two_limits_at_one_place_still_bind():
    """A swapped row needs both; a little of either alone buys nothing."""
    tight = seven_b(host=60 * GIB, device=4 * GIB)
    choice = solve(tight)
    assert choice.ratio == 0 and choice.binds in (Limit.HOST, Limit.DEVICE)
    assert all(relaxed.saves_without == 0 for relaxed in choice.relaxed)


def test_a_slow_link_is_filled_as_far_as_compute_hides_it_and_further_only_if_that_pays():
    link = Link(d2h=1e9, h2d=2e9)
    hidden = (10.15 * 1e9 - 2 * GIB) / (14 * GIB)
    choice = solve(seven_b(host=600 * GIB, link=link))
    assert choice.ratio == pytest.approx(hidden, abs=1e-5)
    assert choice.exposed_d2h == pytest.approx(0, abs=1e-2)
    # Recomputing takes longer than waiting for the copies.
    costly = solve(seven_b(host=600 * GIB, link=link, recompute=60.0))
    assert costly.ratio > choice.ratio and costly.exposed_d2h > 0


def test_the_smallest_buffers_that_cost_no_time_are_taken():
    depths = (LAYERS, Depth(1), Depth(4), Depth(17))
    # Token-wise work hides all; then attention has to, and only what is in buffers can move then.
    even = dict(forward=Times(1, 1, 1), backward=Times(2, 1, 2), host=600 * GIB)
    assert solve(seven_b(depths=depths, **even)).depth == Depth(1)
    assert solve(seven_b(depths=depths)).depth == Depth(17)
    short = solve(seven_b(depths=depths, device=4 * GIB))
    assert short.ratio < 0.467 and short.binds is Limit.DEVICE


def test_a_stage_whose_layers_are_all_resident_asks_for_nothing():
    choice = solve(seven_b(layers=2, host=0))
    assert choice.ratio == 1.0 and choice.host_bytes == 0 and choice.binds is Limit.COMPUTE


# ---- nothing fits


def test_too_little_host_memory_is_refused_with_the_least_that_fits():
    with pytest.raises(NoRoom) as refusal:
        solve(seven_b(host=50 * GIB))
    said = str(refusal.value)
    assert said.startswith("host memory 50 GiB: not enough for --memo-swap-ratio 0")
    assert "must be at least 60 GiB" in said and "\n" not in said
    assert solve(seven_b(host=60 * GIB)).ratio == 0


def test_a_disk_counts_towards_what_fits():
    disk = Disk(10 * GIB, 8e9, 8e9)
    assert solve(seven_b(host=51 * GIB, disk=disk)).disk_bytes >= 9 * GIB
    with pytest.raises(NoRoom, match="host memory 49 GiB and disk space 10 GiB"):
        solve(seven_b(host=49 * GIB, disk=disk))


def test_too_little_device_memory_is_refused_with_the_least_that_fits():
    with pytest.raises(NoRoom, match=r"device memory 3 GiB for buffers: .* buffers take 4 GiB"):
        solve(seven_b(device=3 * GIB))


def test_numbers_that_cannot_be_are_refused_by_name():
    with pytest.raises(ValueError, match=r"forward\.attention is nan"):
        seven_b(forward=Times(1.0, math.nan, 1.0))
    with pytest.raises(ValueError, match="d2h is 0"):
        seven_b(link=Link(0, 1e9))


# ---- MEMO's own program


@pytest.mark.parametrize(("nodes_gib", "ratio"), [(2048, 0.467), (1536, 0.314), (1024, 0.162)])
def test_the_papers_program_gives_the_papers_ratios(nodes_gib, ratio):
    """7B at 1M tokens on 8 GPUs: 1 GiB for each of 16 units of s h."""
    paper = dict(always=2 * GIB, others=14 * GIB, layers=32, host=nodes_gib * GIB / 8)
    choice = paper_program(**paper)
    assert round(choice.ratio, 3) == ratio and choice.binds == "host memory"
    # Where copies are hidden and recomputation costs, the extended program agrees.
    assert solve(seven_b(host=nodes_gib * GIB // 8)).ratio == pytest.approx(choice.ratio, abs=1e-5)


def test_below_480_gib_the_papers_program_does_not_fit():
    paper = dict(always=2 * GIB, others=14 * GIB, layers=32)
    assert paper_program(**paper, host=480 * GIB / 8).ratio == 0
    with pytest.raises(NoRoom, match="alone take 60 GiB"):
        paper_program(**paper, host=479 * GIB / 8)


def test_the_papers_program_hides_copies_behind_a_layers_forward():
    choice = paper_program(
        always=100, others=400, layers=10, host=1e9, bandwidth=50.0, layer_seconds=5.0
    )
    assert choice.ratio == pytest.approx((50 * 5 - 100) / 400) and choice.binds == "D2H"


# ---- schedules


def test_the_bubble_counts_as_passes():
    assert passes(1, 4) == 4 and passes(4, 8) == 11 and passes(4, 8, 2) == 9.5


def test_directions_meet_only_where_micro_batches_alternate():
    assert both_share(30, 1) == 0 and both_share(30, 4) == 2 / 30 and both_share(1, 4) == 1
