"""The canonical search: right in every combination of its techniques, compiled as in Python."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.plan import canonical, native
from megatron_memo.plan.canonical import (
    ORDERS,
    Outcome,
    Search,
    Techniques,
    search_reference,
)
from megatron_memo.plan.instances import perfect, saturated
from megatron_memo.plan.native import StopFlag
from megatron_memo.plan.portfolio import solve
from megatron_memo.plan.problem import Buffer, Problem
from megatron_memo.plan.reduced import reduce_problem
from megatron_memo.plan.verify import verify_layout

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")
ALL = Techniques().mask()
TRIPLES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=7
).map(lambda items: [(start, start + life, size) for start, life, size in items])


def reduced(triples, **more):
    return reduce_problem(*zip(*triples, strict=True), **more)


def run(problem, capacity, **more):
    budget = {key: more.pop(key) for key in ("nodes", "seconds", "stop") if key in more}
    with Search(problem, capacity, **more) as search:
        return search.run(**budget)


def assert_layout(problem, result, capacity):
    assert result.outcome is Outcome.FOUND
    ids = [str(i) for i in range(problem.count)]
    verify_layout(
        ids, problem.lower, problem.upper, problem.size, result.offsets, capacity=capacity
    )


def test_masks_and_techniques_are_each_others_inverse():
    for mask in range(ALL + 1):
        assert Techniques.from_mask(mask).mask() == mask
    assert ALL == 2**10 - 1


@given(TRIPLES, st.integers(0, ALL))
@settings(max_examples=60, deadline=None)
def test_the_lowest_peak_of_exhaustive_search_is_found_and_nothing_below(
    lowest_peak, triples, mask
):
    problem = reduced(triples)
    lowest = lowest_peak(triples) // problem.unit
    techniques = Techniques.from_mask(mask)
    finders = [search_reference] + ([run] if native.library() else [])
    for find in finders:
        assert_layout(problem, find(problem, lowest, techniques=techniques), lowest)
        below = find(problem, lowest - 1, techniques=techniques)
        assert below.outcome is Outcome.INFEASIBLE


@needs_compiler
def test_every_combination_of_techniques_finds_a_layout_where_there_is_one():
    cases = [perfect(14, 8, 12, 3), saturated(14, 9, 4, 8), [(0, 3, 2)] * 5 + [(1, 2, 3)] * 3]
    for triples in cases:
        for reduction in ({}, {"divide_sizes": False}, {"compress_time": False}):
            problem = reduced(triples, **reduction)
            load = max(problem.loads())
            for mask in range(ALL + 1):
                result = run(problem, load, techniques=Techniques.from_mask(mask), seconds=60)
                assert_layout(problem, result, load)


@needs_compiler
def test_every_combination_of_techniques_proves_what_has_no_layout(no_fit_at_load):
    problem = reduced(no_fit_at_load)
    load = max(problem.loads())
    for mask in range(ALL + 1):
        techniques = Techniques.from_mask(mask)
        # Without both of these the proof takes minutes; they are off in turn.
        if not (techniques.split or techniques.failed_states):
            continue
        assert run(problem, load, techniques=techniques).outcome is Outcome.INFEASIBLE
        assert_layout(problem, run(problem, load + 1, techniques=techniques), load + 1)


def test_the_reference_proves_it_too(no_fit_at_load):
    problem = reduced(no_fit_at_load)
    load = max(problem.loads())
    assert search_reference(problem, load).outcome is Outcome.INFEASIBLE
    assert_layout(problem, search_reference(problem, load + 1), load + 1)


@needs_compiler
@pytest.mark.parametrize("seed", range(40))
def test_compiled_and_reference_visit_the_same_nodes(seed):
    rng = random.Random(seed)
    make = rng.choice([perfect, lambda n, t, h, s: saturated(n, h, 4, s)])
    problem = reduced(make(rng.randint(1, 24), rng.choice([5, 9]), rng.choice([9, 14]), seed))
    techniques = Techniques.from_mask(rng.choice([ALL, rng.randrange(ALL + 1)]))
    orders = rng.choice([ORDERS, ("TAW",)])
    for capacity in (max(problem.loads()), max(problem.loads()) + 1):
        more = dict(techniques=techniques, orders=orders, nodes=400)
        assert run(problem, capacity, **more) == search_reference(problem, capacity, **more)


@needs_compiler
def test_short_calls_of_one_search_get_there_too():
    problem = reduced(perfect(80, 60, 400, 0))
    load = max(problem.loads())
    whole = run(problem, load, nodes=200_000)
    with Search(problem, load) as search:
        steps = 0
        while (result := search.run(nodes=300)).outcome is Outcome.ABORTED:
            steps += 1
            assert result.offsets is None
            assert steps < 3000
    assert whole.outcome is result.outcome is Outcome.FOUND
    assert_layout(problem, result, load)


@pytest.mark.parametrize("find", [search_reference, pytest.param(run, marks=needs_compiler)])
def test_time_and_the_stop_flag_end_a_search(find):
    problem = reduced(perfect(200, 300, 10**6, 1))
    load = max(problem.loads())
    assert find(problem, load, seconds=0.0).outcome is Outcome.ABORTED
    stop = StopFlag()
    stop.set()
    assert find(problem, load, stop=stop).outcome is Outcome.ABORTED


@needs_compiler
def test_twelve_thousand_buffers_in_a_chain_do_not_exhaust_the_stack():
    problem = reduced([(k, k + 3, 1 + k % 5) for k in range(12_000)])
    load = max(problem.loads())
    result = run(problem, 2 * load, techniques=Techniques(split=False, no_siblings=False))
    assert_layout(problem, result, 2 * load)


@pytest.mark.parametrize("find", [search_reference, pytest.param(run, marks=needs_compiler)])
def test_the_trivial_cases(find):
    problem = reduced([(0, 1, 5)])
    assert find(problem, 1).offsets == [0]
    assert find(problem, 0).outcome is Outcome.INFEASIBLE
    apart = reduced([(0, 1, 5), (1, 2, 5), (5, 9, 5)])
    assert find(apart, 1).offsets == [0, 0, 0]


@needs_compiler
def test_a_problem_that_needs_too_much_memory_is_refused_and_left_to_other_arms(monkeypatch):
    monkeypatch.setattr(canonical, "LARGEST_TABLE", 10)
    triples = perfect(60, 40, 128, 4)
    with pytest.raises(MemoryError, match="too large"):
        Search(reduced(triples), 128)
    problem = Problem(tuple(Buffer(str(k), *t) for k, t in enumerate(triples)))
    assert solve(problem, time_limit=1, use_cp_sat=False).best.peak >= 128
