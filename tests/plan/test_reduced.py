"""Reduction keeps the problem the same."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.plan.reduced import reduce_problem

TRIPLES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=15
).map(lambda items: [(start, start + life, size) for start, life, size in items])


def overlaps(lower, upper):
    n = range(len(lower))
    return [[lower[i] < upper[j] and lower[j] < upper[i] for j in n] for i in n]


@given(TRIPLES, st.integers(1, 7), st.booleans(), st.booleans())
def test_the_same_buffers_overlap_before_and_after(triples, factor, divide, compress):
    lower, upper, size = (list(column) for column in zip(*triples, strict=True))
    scaled = [s * factor for s in size]
    small = reduce_problem(lower, upper, scaled, divide_sizes=divide, compress_time=compress)
    assert overlaps(small.lower, small.upper) == overlaps(lower, upper)
    assert [s * small.unit for s in small.size] == scaled
    assert all(a < b for a, b in zip(small.lower, small.upper, strict=True))


@given(TRIPLES)
def test_every_clique_is_maximal_and_holds_the_load(triples):
    lower, upper, size = (list(column) for column in zip(*triples, strict=True))
    small = reduce_problem(lower, upper, size)
    members = [
        {i for i in range(small.count) if small.lower[i] <= t < small.upper[i]}
        for t in range(small.cliques)
    ]
    assert all(not (a <= b or b <= a) for a, b in itertools.pairwise(members))
    most = max(sum(s for a, b, s in triples if a <= t < b) for t in range(50))
    assert max(small.loads()) * small.unit == most


@given(TRIPLES, st.data())
def test_a_subset_keeps_what_its_buffers_are(triples, data):
    lower, upper, size = (list(column) for column in zip(*triples, strict=True))
    whole = reduce_problem(lower, upper, size)
    some = data.draw(
        st.lists(st.sampled_from(range(len(size))), min_size=1, unique=True), label="chosen"
    )
    part = whole.subset(some)
    assert overlaps(part.lower, part.upper) == overlaps(
        [lower[i] for i in some], [upper[i] for i in some]
    )
    assert [s * part.unit * whole.unit for s in part.size] == [size[i] for i in some]
    assert part.life == [upper[i] - lower[i] for i in some]
