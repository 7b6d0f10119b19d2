"""Traces to plans: structure, the arms that use it, several windows, what is left out."""

import dataclasses
import itertools

import pytest

from megatron_memo.phases import BACKWARD, FORWARD, LAYER
from megatron_memo.plan import bilevel, native, portfolio
from megatron_memo.plan.advance import Advance
from megatron_memo.plan.bilevel import BiLevel
from megatron_memo.plan.board import Board
from megatron_memo.plan.made_up_traces import SIDE_STREAM, Shape, training
from megatron_memo.plan.passes import passes_of
from megatron_memo.plan.plan_file import PlanError
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.portfolio import solve
from megatron_memo.plan.requests import requests_of
from megatron_memo.plan.savings import savings_of
from megatron_memo.plan.verify_plan import verify_against, verify_plan
from megatron_memo.profile.trace import Free, Header, Malloc, Trace, rounded

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")
QUICK = Search(time_limit=30, workers=1, use_cp_sat=False)
SHAPES = [
    Shape(4, 2, "all"),
    Shape(6, 2, "swap"),
    Shape(5, 2, "input", micro_batches=3, in_flight=2),
    Shape(5, 2, "swap", micro_batches=4, in_flight=2),
    Shape(5, 1, "swap", jitter=0.3),
]


def case(shape):
    requests = requests_of(training(shape))
    problem = requests.problem()
    return problem, passes_of(requests, problem.buffers)


def source(trace, name="t"):
    return Source(name, name, trace)


def trace_of(*events, header=None):
    phases = training(Shape(1)).phases[:1]
    return Trace(header or Header("profile"), phases, tuple(events))


def test_only_the_main_stream_the_large_and_the_short_lived_are_planned():
    trace = training(Shape(3, 2))
    requests = requests_of(trace)
    blocks = trace.blocks()
    assert len(requests.requests) == len(blocks)
    for k, block in enumerate(blocks):
        planned = block.stream != SIDE_STREAM and block.upper is not None
        assert (k in requests.planned) == planned
    assert {r.stream for r in requests.requests} == {0, SIDE_STREAM}
    smallest = 100 << 20
    large = requests_of(trace, smallest)
    assert 0 < len(large.planned) < len(requests.planned)
    assert all(rounded(large.requests[k].size, 512) >= smallest for k in large.planned)


def test_native_bytes_are_those_of_the_requests_left_out():
    requests = requests_of(
        trace_of(
            Malloc(1, 10_000, 0, ""), Malloc(2, 700, 1, ""), Free(2), Malloc(3, 1, 0, ""), Free(1)
        )
    )
    assert requests.planned == (0,)
    assert requests.native_bytes() == (1024, 512)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_passes_hold_every_buffer_once_and_alike_layers_are_one_kind(shape):
    problem, passes = case(shape)
    assert sorted(k for one in passes for k in one.buffers) == list(range(len(problem.buffers)))
    for one, after in itertools.pairwise(passes):
        begin, end = (problem.buffers[p.buffers[0]].lower for p in (one, after))
        for k in one.inner:
            assert begin <= problem.buffers[k].lower and problem.buffers[k].upper <= end
    layers = [one for one in passes if one.number]
    assert len(layers) == 2 * shape.layers * shape.micro_batches
    kinds = {one.kind for one in layers}
    assert len({one.family for one in layers}) <= len(kinds)
    if not shape.jitter:
        assert len(kinds) == 2


def arms(board, passes):
    return {"bi-level": BiLevel(board, passes, 0), "advance": Advance(board, passes, 0)}


@needs_compiler
@pytest.mark.parametrize("name", ["bi-level", "advance"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_arm_alone_offers_verified_layouts(shape, name):
    problem, passes = case(shape)
    board = Board(problem, 100)
    arm = arms(board, passes)[name]
    for _ in range(4):
        if not (board.going() and arm.step(20, 10**6)):
            break
    assert board.best is not None
    assert board.bound <= board.best.peak
    assert board.best.found_by.startswith(name)


@needs_compiler
@pytest.mark.parametrize("keep", ["all", "swap", "input"])
def test_eighty_layers_in_eight_chunks_meet_the_bound(keep):
    problem, passes = case(Shape(80, 8, keep))
    assert len(problem.buffers) > 40_000
    solution = solve(problem, time_limit=200, workers=1, use_cp_sat=False, passes=passes)
    assert solution.gap == 0


@needs_compiler
def test_advance_meets_the_bound_alone_and_deeper_costs_no_more_searches(monkeypatch):
    searched = []
    real = Advance._search
    monkeypatch.setattr(Advance, "_search", lambda *args: searched.append(1) or real(*args))
    counts = []
    for layers in (30, 60):
        searched.clear()
        problem, passes = case(Shape(layers, 4, "swap"))
        board = Board(problem, 200)
        arm = Advance(board, passes, 0)
        while board.going():
            arm.step(100, 1)
        assert board.best.peak == board.bound
        counts.append(len(searched))
    assert counts[1] <= counts[0] + 10


def test_level_one_answers_are_kept_across_depths(monkeypatch):
    monkeypatch.setattr(bilevel, "_answers", {})
    searched = []
    real = bilevel.GreedyArm.step
    monkeypatch.setattr(
        bilevel.GreedyArm, "step", lambda self, *a: searched.append(1) or real(self, *a)
    )
    counts = []
    for layers in (4, 8, 8):
        problem, passes = case(Shape(layers, 2, "input"))
        searched.clear()
        BiLevel(Board(problem, 100), passes, 0).step(20, 10**6)
        counts.append(len(searched))
    assert counts[0] > 0 and counts[1:] == [0, 0]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plan_is_never_worse_than_the_flat_one(shape):
    problem, passes = case(shape)
    more = dict(time_limit=30, workers=1, use_cp_sat=False)
    flat, structured = solve(problem, **more), solve(problem, passes=passes, **more)
    assert structured.best.peak <= flat.best.peak


def test_deterministic_plans_are_equal():
    trace = training(Shape(5, 2, "swap", jitter=0.2))
    search = dataclasses.replace(QUICK, deterministic=True, time_limit=200)
    plans = [make_plan([source(trace)], search).plan for _ in "ab"]
    assert plans[0] == plans[1]


def test_several_windows_share_one_arena_of_the_largest():
    traces = [training(Shape(3, chunks, unit=1 << unit)) for chunks, unit in ((1, 24), (2, 26))]
    alone = [make_plan([source(t)], QUICK).plan for t in traces]
    both = make_plan([source(t, f"t{k}") for k, t in enumerate(traces)], QUICK).plan
    assert both.arena == max(p.arena for p in alone)
    assert both.bound == max(p.bound for p in alone)
    assert [w.source for w in both.windows] == ["t0", "t1"]
    for k, trace in enumerate(traces):
        assert verify_against(both, trace, f"t{k}") == f"t{k}"


@pytest.mark.parametrize("change", [dict(world_size=2), dict(device="cpu"), dict(rounding=64)])
def test_traces_of_different_processes_are_refused_together(change):
    trace = training(Shape(2))
    other = dataclasses.replace(trace, header=dataclasses.replace(trace.header, **change))
    with pytest.raises(PlanError, match=f"{next(iter(change))} .* one process"):
        make_plan([source(trace), source(other)], QUICK)


def test_a_trace_whose_blocks_all_outlive_it_has_nothing_to_plan():
    with pytest.raises(PlanError, match="no request can be planned"):
        make_plan([source(trace_of(Malloc(1, 100, 0, "")))], QUICK)


def test_a_block_that_is_never_freed_is_left_to_the_native_allocator():
    plan = make_plan(
        [source(trace_of(Malloc(1, 100, 0, ""), Malloc(2, 600, 0, ""), Free(2)))], QUICK
    ).plan
    assert [e.offset for e in plan.windows[0].entries] == [None, 0]
    assert plan.arena == 1024
    verify_plan(plan)


def test_interrupted_it_returns_the_best_verified_plan(monkeypatch):
    def interrupt(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio.Board, "wait", interrupt)
    traces = [training(Shape(3, 2)), training(Shape(2, 1))]
    planned = make_plan([source(t, str(k)) for k, t in enumerate(traces)], QUICK)
    assert planned.interrupted
    verify_plan(planned.plan)


def test_savings_are_those_of_the_planned_requests():
    trace = training(Shape(4, 2))
    requests = requests_of(trace)
    plan = make_plan([source(trace)], QUICK).plan
    savings = savings_of([requests])
    assert savings.native > savings.expandable >= plan.bound
    assert savings.iterations >= 2


def test_made_up_traces_are_reproducible_and_have_the_phases_of_training():
    shape = Shape(3, 2, micro_batches=2, in_flight=2, jitter=0.1)
    assert training(shape) == training(shape)
    layers = [p for p in training(shape).phases if p.part == LAYER]
    assert {p.direction for p in layers} == {FORWARD, BACKWARD}
    assert {p.chunk for p in layers} == {None, 0, 1}
    assert {p.micro_batch for p in layers} == {0, 1}
