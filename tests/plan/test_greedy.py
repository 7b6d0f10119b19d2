"""Greedy passes: compiled and reference agree, and everything they make is a layout."""

import pytest

from megatron_memo.plan import greedy, native
from megatron_memo.plan.greedy import Greedy, orders, place, skyline
from megatron_memo.plan.instances import perfect, saturated, transformer
from megatron_memo.plan.native import StopFlag
from megatron_memo.plan.reduced import reduce_problem
from megatron_memo.plan.verify import verify_layout

CASES = {
    "one": [(0, 1, 5)],
    "perfect": perfect(60, 30, 500, 1),
    "saturated": saturated(80, 300, 6, 2),
    "layers": transformer(3, 4),
    "many": saturated(700, 10**6, 20, 5),
}


def reduced(name):
    return reduce_problem(*zip(*CASES[name], strict=True))


@pytest.mark.skipif(native.library() is None, reason="no compiler on this machine")
@pytest.mark.parametrize("name", CASES)
def test_compiled_passes_equal_the_reference(name):
    problem = reduced(name)
    fast = Greedy(problem, StopFlag())
    for order_name, order in orders(problem):
        for best_fit in (False, True):
            slow = place(problem, order, best_fit=best_fit)
            assert fast.place(order, best_fit=best_fit) == slow, order_name
            peak = max(at + s for at, s in zip(slow, problem.size, strict=True))
            assert fast.place(order, best_fit=best_fit, ceiling=peak) == slow
            assert fast.place(order, best_fit=best_fit, ceiling=peak - 1) is None
            assert place(problem, order, best_fit=best_fit, ceiling=peak - 1) is None
    assert fast.skyline() == skyline(problem)


@pytest.mark.parametrize("name", CASES)
def test_every_pass_makes_a_layout(name):
    problem = reduced(name)
    ids = [str(i) for i in range(problem.count)]
    fast = Greedy(problem, StopFlag())
    layouts = [fast.place(order) for _, order in orders(problem)] + [fast.skyline()]
    for layout in layouts:
        verify_layout(ids, problem.lower, problem.upper, problem.size, layout)


@pytest.mark.parametrize("name", CASES)
def test_orders_name_every_buffer_once(name):
    problem = reduced(name)
    for _, order in orders(problem):
        assert sorted(order) == list(range(problem.count))


def test_buffers_that_lie_already_stay_where_they_are():
    problem = reduced("saturated")
    whole = Greedy(problem, StopFlag()).place(range(problem.count))
    fixed = [at if k % 2 else -1 for k, at in enumerate(whole)]
    rest = [k for k in range(problem.count) if k % 2 == 0]
    result = Greedy(problem, StopFlag()).place(rest, fixed=fixed)
    assert all(result[k] == whole[k] for k in range(1, problem.count, 2))
    assert result == place(problem, rest, fixed=fixed)
    ids = [str(i) for i in range(problem.count)]
    verify_layout(ids, problem.lower, problem.upper, problem.size, result)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_stop_flag_ends_a_pass(compiled, request):
    if not compiled:
        request.getfixturevalue("no_compiler")
    problem = reduced("many")
    stop = StopFlag()
    stop.set()
    passes = Greedy(problem, stop)
    assert passes.place(range(problem.count)) is None
    assert passes.skyline() is None


def test_span_maxima_are_the_maxima_of_the_spans():
    problem = reduced("many")
    loads = problem.loads()
    assert greedy.span_maxima(problem, loads) == [
        max(loads[a:b]) for a, b in zip(problem.lower, problem.upper, strict=True)
    ]
