"""The portfolio: what it claims is right, with every arm, with and without a compiler."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.plan import native, portfolio
from megatron_memo.plan.arms import CanonicalArm, GreedyArm, SqueakyArm
from megatron_memo.plan.board import Board
from megatron_memo.plan.cp_sat import CpSatArm
from megatron_memo.plan.hot_first import HotFirst
from megatron_memo.plan.instances import perfect, transformer
from megatron_memo.plan.portfolio import Status, solve
from megatron_memo.plan.problem import Buffer, Problem, load_bound
from megatron_memo.plan.verify import LayoutError, verify_layout

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")
TRIPLES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=7
).map(lambda items: [(start, start + life, size) for start, life, size in items])
# Without CP-SAT: its first import alone takes longer than most of these.
quick = dict(use_cp_sat=False, workers=1, time_limit=60)


def problem_of(triples, capacity=None):
    return Problem(tuple(Buffer(str(k), *t) for k, t in enumerate(triples)), capacity)


def check(problem, solution):
    verify_layout(
        [b.id for b in problem.buffers],
        [b.lower for b in problem.buffers],
        [b.upper for b in problem.buffers],
        [b.size for b in problem.buffers],
        solution.best.offsets,
        capacity=solution.best.peak,
    )
    assert load_bound(problem) <= solution.bound <= solution.best.peak


@given(TRIPLES)
@settings(max_examples=60, deadline=None)
def test_up_to_seven_buffers_the_peak_is_the_lowest_and_proven(lowest_peak, triples):
    problem = problem_of(triples)
    solution = solve(problem, **quick)
    check(problem, solution)
    assert solution.best.peak == solution.bound == lowest_peak(triples)
    assert solution.gap == 0


@given(TRIPLES, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_infeasible_is_said_exactly_when_the_lowest_peak_is_above(lowest_peak, triples, more):
    largest = max(size for _, _, size in triples)
    lowest = lowest_peak(triples)
    fits = problem_of(triples, lowest + more)
    solution = solve(fits, **quick)
    check(fits, solution)
    assert solution.status is Status.SOLVED and solution.best.peak <= lowest + more
    if largest < lowest:
        assert solve(problem_of(triples, lowest - 1), **quick).status is Status.INFEASIBLE


@given(TRIPLES, st.integers(2, 1000))
@settings(max_examples=30, deadline=None)
def test_scaling_the_sizes_scales_the_offsets(triples, factor):
    more = dict(quick, deterministic=True)
    plain = solve(problem_of(triples), **more)
    scaled = solve(problem_of([(a, b, size * factor) for a, b, size in triples]), **more)
    assert scaled.best.offsets == tuple(at * factor for at in plain.best.offsets)
    assert scaled.bound == plain.bound * factor


@given(TRIPLES, st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 9)))
@settings(max_examples=30, deadline=None)
def test_one_more_buffer_never_lowers_the_proven_bound(triples, extra):
    start, life, size = extra
    before = solve(problem_of(triples), **quick)
    after = solve(problem_of([*triples, (start, start + life, size)]), **quick)
    assert after.bound >= before.bound


def test_a_bound_above_the_load_is_proven(no_fit_at_load):
    solution = solve(problem_of(no_fit_at_load), **quick)
    assert load_bound(problem_of(no_fit_at_load)) == 9
    assert (solution.bound, solution.best.peak, solution.gap) == (10, 10, 0)
    assert solution.bound_by == "canonical search"
    assert solve(problem_of(no_fit_at_load, 9), **quick).status is Status.INFEASIBLE


@needs_compiler
@pytest.mark.parametrize("kept", [0, 10])
def test_layers_of_different_sizes_meet_the_bound(kept):
    problem = problem_of(transformer(32, 3, kept=kept))
    solution = solve(problem, time_limit=100)
    check(problem, solution)
    assert solution.gap == 0


@needs_compiler
def test_a_deterministic_run_gives_the_same_layout_twice():
    problem = problem_of(perfect(80, 60, 400, 3), 400)
    runs = [solve(problem, deterministic=True, seed=5, **quick | {"time_limit": 200}) for _ in "ab"]
    assert runs[0].best.offsets == runs[1].best.offsets
    assert runs[0].status is runs[1].status is Status.SOLVED
    assert runs[0].best.found_by == runs[1].best.found_by


@pytest.mark.parametrize("workers", [1, 3])
def test_without_a_compiler_it_still_solves(no_compiler, no_fit_at_load, workers):
    solution = solve(problem_of(no_fit_at_load), workers=workers, use_cp_sat=False, time_limit=100)
    assert solution.gap == 0 and not solution.compiled
    larger = problem_of(perfect(40, 30, 90, 3))
    check(larger, solve(larger, workers=workers, use_cp_sat=False, time_limit=2))


def arms(board):
    return {
        "greedy": lambda: GreedyArm(board),
        "squeaky": lambda: SqueakyArm(board, 1),
        "canonical": lambda: CanonicalArm(board, 1),
        "hot first": lambda: HotFirst(board, 1),
        "CP-SAT": lambda: CpSatArm(board, 1, deterministic=True),
    }


@needs_compiler
@pytest.mark.parametrize("name", arms(None))
@pytest.mark.parametrize("capacity", [None, 90])
def test_every_arm_alone_offers_layouts_and_only_right_ones(name, capacity):
    problem = problem_of(perfect(24, 12, 90, 8), capacity)
    board = Board(problem, 100)
    arm = arms(board)[name]()
    for _ in range(3):
        if not (board.going() and arm.step(10, 3000)):
            break
    board.halt()
    # Hot first leaves a problem whose cliques are all hot to the canonical search.
    assert board.best is not None or name == "hot first"
    assert board.bound == 90


def test_cp_sat_proves_bounds_and_infeasibility(no_fit_at_load):
    board = Board(problem_of(no_fit_at_load), 100)
    GreedyArm(board).step(1, 1)
    arm = CpSatArm(board, 1, deterministic=False)
    while board.going():
        arm.step(20, 10**6)
    assert (board.bound, board.best.peak) == (10, 10)
    board = Board(problem_of(no_fit_at_load, 9), 100)
    CpSatArm(board, 1, deterministic=False).step(20, 10**6)
    assert board.infeasible


def test_the_board_takes_no_wrong_layout_and_no_worse_one():
    board = Board(problem_of([(0, 2, 4), (1, 3, 6)]), 100)
    with pytest.raises(LayoutError):
        board.offer([0, 0], "a broken arm")
    assert board.best is None
    assert board.offer([6, 0], "first")  # in units of 2
    assert not board.offer([6, 0], "again")
    assert board.best.peak == 16


def test_an_arm_that_breaks_ends_the_solve_with_its_error(monkeypatch):
    def broken(self, seconds, nodes):
        raise RuntimeError("broken arm")

    monkeypatch.setattr(portfolio.GreedyArm, "step", broken)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken arm"):
        solve(problem_of([(0, 2, 4), (1, 3, 6)]), **quick)
    assert threading.active_count() == before


def test_the_time_limit_is_kept_and_the_best_layout_comes_back():
    problem = problem_of(perfect(300, 500, 10**6, 0))
    solution = solve(problem, time_limit=1.5, workers=2, use_cp_sat=False)
    check(problem, solution)
    assert solution.timed_out and solution.status is Status.SOLVED
    below = problem_of(perfect(300, 500, 10**6, 0), 10**6)
    solution = solve(below, time_limit=1, workers=1, use_cp_sat=False)
    assert solution.status is Status.UNSOLVED and solution.best.peak > 10**6


@pytest.mark.parametrize("bad", [dict(workers=0), dict(time_limit=0), dict(time_limit=-1.0)])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        solve(problem_of([(0, 1, 1)]), **bad)
