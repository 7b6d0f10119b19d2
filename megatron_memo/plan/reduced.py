"""The same problem in smaller numbers, as all solvers here see it.

- Sizes are divided by their greatest common divisor: layouts whose offsets are not multiples of it
  are never better.
- Time is compressed to the maximal cliques of the interval graph: a moment whose buffers are all
  alive at another moment too says nothing of its own. Buffers overlap in compressed time exactly
  when they overlap in real time.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reduced:
    """n buffers as parallel lists. Sizes are in `unit`s, spans count cliques, ends exclusive."""

    lower: list[int]
    upper: list[int]
    size: list[int]
    life: list[int]  # the real lifetimes: solvers rank by them
    start: list[int]  # the real beginnings
    unit: int

    @property
    def count(self) -> int:
        return len(self.size)

    @property
    def cliques(self) -> int:
        return max(self.upper)

    def loads(self) -> list[int]:
        """Load of each clique in units."""
        change = [0] * (self.cliques + 1)
        for lower, upper, size in zip(self.lower, self.upper, self.size, strict=True):
            change[lower] += size
            change[upper] -= size
        loads, load = [], 0
        for step in change[:-1]:
            load += step
            loads.append(load)
        return loads

    def subset(self, indices: Sequence[int]) -> Reduced:
        """The problem of some buffers alone, reduced again."""
        part = reduce_problem(
            [self.lower[i] for i in indices],
            [self.upper[i] for i in indices],
            [self.size[i] for i in indices],
        )
        return Reduced(
            part.lower,
            part.upper,
            part.size,
            [self.life[i] for i in indices],
            [self.start[i] for i in indices],
            part.unit,
        )


def reduce_problem(
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    *,
    divide_sizes: bool = True,
    compress_time: bool = True,
) -> Reduced:
    """Both steps can be switched off (they are tested against their absence); without time
    compression spans still count the sections between events."""
    unit = math.gcd(*size) if divide_sizes else 1
    if compress_time:
        cliques = _clique_ends(lower, upper)
        spans = [
            (bisect.bisect_right(cliques, a), bisect.bisect_right(cliques, b))
            for a, b in zip(lower, upper, strict=True)
        ]
    else:
        times = sorted({*lower, *upper})
        index = {time: k for k, time in enumerate(times)}
        spans = [(index[a], index[b]) for a, b in zip(lower, upper, strict=True)]
    return Reduced(
        lower=[a for a, _ in spans],
        upper=[b for _, b in spans],
        size=[s // unit for s in size],
        life=[b - a for a, b in zip(lower, upper, strict=True)],
        start=list(lower),
        unit=unit,
    )


def _clique_ends(lower: Sequence[int], upper: Sequence[int]) -> list[int]:
    """The times just before which a clique is maximal: an end with a beginning since the last."""
    starts, ends = set(lower), set(upper)
    cliques: list[int] = []
    grown = False
    for time in sorted(starts | ends):
        if grown and time in ends:
            cliques.append(time)
            grown = False
        if time in starts:
            grown = True
    return cliques
