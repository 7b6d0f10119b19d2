"""Problems: what is refused, and the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.plan.problem import Buffer, Problem, ProblemError, load_bound, peak_of

TRIPLES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 50)), min_size=1, max_size=12
).map(lambda items: [(start, start + life, size) for start, life, size in items])


def problem_of(triples, capacity=None):
    return Problem(tuple(Buffer(str(k), *t) for k, t in enumerate(triples)), capacity)


@pytest.mark.parametrize(
    ("buffers", "capacity", "says"),
    [
        ([], None, "no buffers"),
        ([Buffer("x", 0, 1, 0)], None, "size is 0"),
        ([Buffer("x", 0, 1, -3)], None, "size is -3"),
        ([Buffer("x", 0, 1, 2**53 + 1)], None, "2\\^53"),
        ([Buffer("x", 0, 2**53 + 1, 1)], None, "2\\^53"),
        ([Buffer("x", -1, 1, 1)], None, "negative"),
        ([Buffer("x", 4, 4, 1)], None, "before upper"),
        ([Buffer("x", 5, 4, 1)], None, "before upper"),
        ([Buffer("x", 0, 1, 1), Buffer("x", 2, 3, 1)], None, "twice"),
        ([Buffer("x", 0, 1, 9)], 8, "can't hold buffer 'x'"),
        ([Buffer("x", 0, 1, 9)], 0, "at least 1"),
        ([Buffer(str(k), 0, 1, 2**53) for k in range(600)], None, "2\\^62"),
    ],
)
def test_what_is_no_problem_is_refused_in_one_line(buffers, capacity, says):
    with pytest.raises(ProblemError, match=says) as caught:
        Problem(tuple(buffers), capacity)
    assert "\n" not in str(caught.value)


@given(TRIPLES)
def test_the_bound_is_the_most_bytes_alive_at_any_moment(triples):
    most = max(
        sum(size for start, end, size in triples if start <= time < end) for time in range(20)
    )
    assert load_bound(problem_of(triples)) == most


@given(TRIPLES, st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 50)))
def test_one_more_buffer_never_lowers_the_bound(triples, extra):
    start, life, size = extra
    more = [*triples, (start, start + life, size)]
    assert load_bound(problem_of(more)) >= load_bound(problem_of(triples))


def test_the_largest_sizes_are_taken():
    problem = problem_of([(0, 1, 2**53), (0, 1, 2**53 - 1)])
    assert load_bound(problem) == 2**54 - 1
    assert peak_of(problem, [0, 2**53]) == 2**54 - 1
