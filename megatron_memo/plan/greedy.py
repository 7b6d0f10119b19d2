"""Greedy layouts: one pass over the buffers in some order, each to the lowest or tightest gap.

`Greedy` runs compiled code where there is some; `place` and `skyline` are the Python references,
which give the same layouts. Offsets and sizes are in the units of the reduced problem.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import native
from .native import StopFlag
from .reduced import Reduced

NO_CEILING = 2**62


class GreedyMemoryError(MemoryError):
    """Compiled code could not get memory."""


def orders(problem: Reduced) -> Iterator[tuple[str, list[int]]]:
    """Orders in which buffers are worth placing with their names, the most useful first."""
    size, life, start = problem.size, problem.life, problem.start
    width = [b - a for a, b in zip(problem.lower, problem.upper, strict=True)]
    loads = problem.loads()
    most = span_maxima(problem, loads)
    keys: dict[str, Callable[[int], tuple[int, ...]]] = {
        "load, lifetime": lambda i: (-most[i], -life[i], -size[i]),
        "size": lambda i: (-size[i], -life[i]),
        "lifetime": lambda i: (-life[i], -size[i]),
        "area": lambda i: (-size[i] * life[i],),
        "load, area": lambda i: (-most[i], -size[i] * life[i], -life[i]),
        "width, area": lambda i: (-width[i], -size[i] * width[i], -most[i]),
        "start": lambda i: (start[i], -size[i]),
        "end": lambda i: (-(start[i] + life[i]), -size[i]),
    }
    for name, key in keys.items():
        yield name, sorted(range(problem.count), key=key)
    yield "breadth", _by_breadth(problem, loads)


def span_maxima(problem: Reduced, loads: Sequence[int]) -> list[int]:
    """The highest load within each buffer's life, by a sparse table."""
    table = [list(loads)]
    while 2 ** len(table) <= len(loads):
        half, last = 2 ** (len(table) - 1), table[-1]
        table.append([max(a, b) for a, b in zip(last, last[half:], strict=False)])
    result = []
    for a, b in zip(problem.lower, problem.upper, strict=True):
        level = (b - a).bit_length() - 1
        result.append(max(table[level][a], table[level][b - 2**level]))
    return result


def _by_breadth(problem: Reduced, loads: Sequence[int]) -> list[int]:
    """Cliques by load; within one its buffers by size."""
    by_load = sorted(range(len(loads)), key=lambda clique: -loads[clique])
    rank = {clique: k for k, clique in enumerate(by_load)}
    # The first clique in that order that holds a buffer: a minimum over its span.
    negated = [-rank[clique] for clique in range(len(loads))]
    first = [-value for value in span_maxima(problem, negated)]
    return sorted(range(problem.count), key=lambda i: (first[i], -problem.size[i]))


class Greedy:
    """Passes over one reduced problem."""

    def __init__(self, problem: Reduced, stop: StopFlag) -> None:
        self.problem = problem
        self.stop = stop
        self._lib = native.library()
        self._lower = array("i", problem.lower)
        self._upper = array("i", problem.upper)
        self._size = array("q", problem.size)

    def place(
        self,
        order: Sequence[int],
        *,
        best_fit: bool = False,
        ceiling: int = NO_CEILING,
        fixed: Sequence[int] | None = None,
    ) -> list[int] | None:
        """Offsets, or None when one would end above the ceiling or the stop flag is up.

        `fixed` holds offsets of buffers that lie already and -1 for those in `order`.
        """
        if self._lib is None:
            return place(
                self.problem, order, best_fit=best_fit, ceiling=ceiling, fixed=fixed, stop=self.stop
            )
        offsets = array("q", [-1] * self.problem.count if fixed is None else fixed)
        sequence = array("i", order)
        peak = self._lib.memo_greedy_place(
            self.problem.count,
            native.pointer(self._lower),
            native.pointer(self._upper),
            native.pointer(self._size),
            native.pointer(sequence),
            len(sequence),
            int(best_fit),
            ceiling,
            self.stop.pointer,
            native.pointer(offsets),
        )
        return _result(peak, offsets)

    def skyline(self, *, ceiling: int = NO_CEILING) -> list[int] | None:
        """As `place`, by the skyline heuristic."""
        if self._lib is None:
            return skyline(self.problem, ceiling=ceiling, stop=self.stop)
        offsets = array("q", [-1] * self.problem.count)
        peak = self._lib.memo_greedy_skyline(
            self.problem.count,
            native.pointer(self._lower),
            native.pointer(self._upper),
            native.pointer(self._size),
            ceiling,
            self.stop.pointer,
            native.pointer(offsets),
        )
        return _result(peak, offsets)


def _result(peak: int, offsets: array[int]) -> list[int] | None:
    if peak == -3:
        raise GreedyMemoryError("no memory for a greedy pass")
    return offsets.tolist() if peak >= 0 else None


def place(
    problem: Reduced,
    order: Iterable[int],
    *,
    best_fit: bool = False,
    ceiling: int = NO_CEILING,
    fixed: Sequence[int] | None = None,
    stop: StopFlag | None = None,
) -> list[int] | None:
    """Reference of the compiled pass."""
    lower, upper, size = problem.lower, problem.upper, problem.size
    offsets = [-1] * problem.count if fixed is None else list(fixed)
    placed = sorted((at, i) for i, at in enumerate(offsets) if at >= 0)
    for i in order:
        if stop:
            return None
        free, best, smallest = 0, -1, NO_CEILING * 2
        for at, j in placed:
            if lower[j] >= upper[i] or lower[i] >= upper[j]:
                continue
            if size[i] <= at - free < smallest:
                best, smallest = free, at - free
                if not best_fit:
                    break
            free = max(free, at + size[j])
        at = best if best >= 0 else free
        if at + size[i] > ceiling:
            return None
        offsets[i] = at
        placed.append((at, i))
        placed.sort()
    return offsets


def skyline(
    problem: Reduced, *, ceiling: int = NO_CEILING, stop: StopFlag | None = None
) -> list[int] | None:
    """Reference of the compiled skyline: into the lowest, then leftmost valley goes the buffer
    with the longest (compressed) life that fits between its walls, the largest of those."""
    lower, upper, size = problem.lower, problem.upper, problem.size
    height = [0] * problem.cliques
    offsets = [-1] * problem.count
    open_ = sorted(range(problem.count), key=lambda i: (lower[i] - upper[i], -size[i], i))
    while open_:
        if stop:
            return None
        floor = min(height)
        a = height.index(floor)
        b = a
        while b < len(height) and height[b] == floor:
            b += 1
        i = next((i for i in open_ if a <= lower[i] and upper[i] <= b), None)
        if i is None:
            walls = ([height[a - 1]] if a else []) + ([height[b]] if b < len(height) else [])
            height[a:b] = [min(walls)] * (b - a)
            continue
        open_.remove(i)
        offsets[i] = floor
        if floor + size[i] > ceiling:
            return None
        height[lower[i] : upper[i]] = [floor + size[i]] * (upper[i] - lower[i])
    return offsets
