"""Fixtures of the planner's tests. Nothing here needs data from outside the repository."""

import itertools

import pytest

from megatron_memo.plan import native

# No layout meets the load of 9 here: the smallest of this kind that a search among random ones saw.
NO_FIT_AT_LOAD = [
    *((0, 1, 1), (0, 2, 5), (1, 3, 1), (2, 3, 1), (2, 4, 1), (0, 4, 2)),
    *((2, 5, 3), (0, 5, 1), (5, 6, 4), (4, 7, 3), (3, 7, 2), (6, 7, 4)),
]


@pytest.fixture
def no_fit_at_load():
    return list(NO_FIT_AT_LOAD)


@pytest.fixture
def no_compiler(monkeypatch):
    """As on a machine without a compiler."""
    monkeypatch.setattr(native, "_load", lambda: (None, "this test took the compiler away"))


@pytest.fixture(scope="session")
def lowest_peak():
    return exhaustive_peak


def exhaustive_peak(triples):
    """The lowest peak by trying every order of placement: a layout in which no buffer can sink
    comes from one of them."""
    count = len(triples)
    meets = [
        [j for j in range(count) if triples[j][0] < triples[i][1] and triples[i][0] < triples[j][1]]
        for i in range(count)
    ]
    lowest = sum(size for _, _, size in triples)
    for order in itertools.permutations(range(count)):
        tops, peak = {}, 0
        for i in order:
            tops[i] = max((tops[j] for j in meets[i] if j in tops), default=0) + triples[i][2]
            peak = max(peak, tops[i])
            if peak >= lowest:
                break
        lowest = min(lowest, peak)
    return lowest
