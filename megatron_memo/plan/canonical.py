"""Canonical-order search: is there a layout below a capacity? A proof either way, given time.

**The layout looked for.** Among all layouts that fit take one whose offsets have the smallest sum.
No buffer of it can be moved down, not even by jumping over others. The search places buffers in
the order of (offset, rank); each comes to lie at its *rest*, the highest top among the placed
buffers that share time with it. A branch that contradicts the smallest sum, or the order, can't
lead to this layout and is cut. Nothing else is cut, so a search that ends without a layout is a
proof that there is none.

This module holds the techniques, the search in plain Python (`search_reference`, the text to
read, and what runs where there is no compiler) and the face of the compiled one (`Search`). Both
visit the same nodes in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from . import native
from .native import StopFlag
from .reduced import Reduced

# Static orders, highest first by each letter. W real life, A real life times size, w and a the same
# in cliques, Z size, T the highest load within the life.
ORDERS = ("WAT", "TAW", "TWA", "waT", "Taw", "Twa")
UNLIMITED = 2**62
# Propagation goes back and forth between lifts and floors at most so often after a placement.
PASSES = 3
# Shaken starts change the ranking keys by up to this share.
SHAKE = 0.3
# Entries of the table that says which buffers are in which clique: 4 bytes each.
LARGEST_TABLE = 10**8


@dataclass(frozen=True)
class Techniques:
    """Each can be switched off alone; none changes what is found to be feasible.

    quick_reject: everything unplaced in a section lies at or above the next offset, so an offset
        above capacity minus the highest remaining load is cut before anything is updated.
    dominance: an unplaced buffer whose rest plus size is at most the next offset could fall into
        that hole: the sum is not the smallest.
    lift: a buffer passed over in the order can't stay at its rest. Something unplaced must block
        that place, beginning below rest + size, and the buffer lies above it: a better lower bound
        of its offset, or a cut when nothing can block.
    floors: the lowest bound among a section's unplaced buffers is a floor; floor plus remaining
        load above the capacity is a cut.
    unique: where only one buffer can continue a section without overflow, all others of the section
        lie above it. Works on the floors and brings them with it.
    split: when no unplaced buffer crosses a moment, the sides are problems of their own. The
        tighter one goes first.
    no_siblings: a buffer without unplaced neighbours lies at its rest in the layout looked for;
        there is no alternative to placing it.
    failed_states: unplaced buffers with their rests and bounds decide everything below a node.
        States that failed are remembered across orders and restarts.
    twins: buffers with the same span and size are interchangeable: in index order, each above the
        one before.
    dynamic_order: the parts of a split are ranked again, by the load that remains.
    """

    quick_reject: bool = True
    dominance: bool = True
    lift: bool = True
    floors: bool = True
    unique: bool = True
    split: bool = True
    no_siblings: bool = True
    failed_states: bool = True
    twins: bool = True
    dynamic_order: bool = True

    def mask(self) -> int:
        """Bits in the order of the fields, as the compiled search reads them."""
        return sum(getattr(self, field.name) << k for k, field in enumerate(fields(self)))

    @classmethod
    def from_mask(cls, mask: int) -> Techniques:
        return cls(*(bool(mask >> k & 1) for k in range(len(fields(cls)))))


class Outcome(Enum):
    FOUND = 0
    INFEASIBLE = 1
    ABORTED = 2  # out of nodes or time, or stopped


@dataclass(frozen=True)
class SearchResult:
    outcome: Outcome
    offsets: list[int] | None  # in units
    nodes: int  # so far, over all calls
    hits: int  # failed states met again
    order: str  # the order that ended the search


def order_name(orders: Sequence[str], index: int) -> str:
    """Indices behind the last order are those of shaken starts."""
    shaken, turn = divmod(index, len(orders))
    return f"{orders[turn]}, shaken" if shaken else orders[turn]


class Search:
    """The compiled search, which may be run in several calls. Needs `native.library()`.

    Starts follow one another over all calls. One that a call's limits cut short is begun again by
    the next call; what failed in it is remembered.

    Raises MemoryError for problems whose table of cliques and members would be too large.
    """

    def __init__(
        self,
        problem: Reduced,
        capacity: int,
        *,
        techniques: Techniques | None = None,
        orders: Sequence[str] = ORDERS,
        seed: int = 0,
        pins: Sequence[int] | None = None,
    ) -> None:
        """`pins` holds offsets that are given, in units, and -1 for the buffers to place."""
        lib = native.library()
        if lib is None:
            raise native.NativeError(native.why_not())
        if sum(problem.upper) - sum(problem.lower) > LARGEST_TABLE:
            raise MemoryError("the problem is too large for the canonical search")
        self._lib = lib
        self._count = problem.count
        self._orders = tuple(orders)
        lower, upper = array("i", problem.lower), array("i", problem.upper)
        size, life = array("q", problem.size), array("d", problem.life)
        self._handle = lib.memo_canonical_new(
            problem.count,
            native.pointer(lower),
            native.pointer(upper),
            native.pointer(size),
            native.pointer(life),
            capacity,
            (techniques or Techniques()).mask(),
            ",".join(orders).encode(),
            seed % 2**64,
        )
        if not self._handle:
            raise MemoryError("no memory for the canonical search")
        if pins is not None:
            given = array("q", pins)
            lib.memo_canonical_pin(ctypes.c_void_p(self._handle), native.pointer(given))

    def run(
        self, *, nodes: int = UNLIMITED, seconds: float = 1e9, stop: StopFlag | None = None
    ) -> SearchResult:
        """Searches for at most so many nodes and tried placements together, and so many seconds.
        Other Python threads run meanwhile."""
        offsets = array("q", [0] * self._count)
        stats = array("q", [0] * 3)
        status = self._lib.memo_canonical_run(
            self._handle,
            nodes,
            seconds,
            (stop or StopFlag()).pointer,
            native.pointer(offsets),
            native.pointer(stats),
        )
        if status == 3:
            raise MemoryError("no memory for the canonical search")
        outcome = Outcome(status)
        return SearchResult(
            outcome,
            offsets.tolist() if outcome is Outcome.FOUND else None,
            stats[0],
            stats[1],
            order_name(self._orders, stats[2]),
        )

    def close(self) -> None:
        if self._handle:
            self._lib.memo_canonical_free(self._handle)
            self._handle = None

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


class _BudgetSpent(Exception):
    """Ends a reference search that ran out of nodes or time."""


class _Reference:
    """The search in Python; attributes as in csrc/canonical.cc."""

    def __init__(
        self, problem: Reduced, capacity: int, techniques: Techniques, spent: Callable[[], bool]
    ) -> None:
        self.problem, self.capacity, self.use = problem, capacity, techniques
        self.spent = spent
        self.nodes = self.hits = 0
        self.budget = 0
        n = problem.count
        self.lower, self.upper, self.size = problem.lower, problem.upper, problem.size
        self.jitter = [1.0] * n
        self.sections = problem.cliques
        self.load = problem.loads()
        self.base = [0] * self.sections
        self.members = [
            [i for i in range(n) if self.lower[i] <= t < self.upper[i]]
            for t in range(self.sections)
        ]
        self.neighbours = [
            [
                j
                for j in range(n)
                if j != i and self.lower[i] < self.upper[j] and self.lower[j] < self.upper[i]
            ]
            for i in range(n)
        ]
        self.rest = [0] * n
        self.low = [0] * n
        self.unplaced = [True] * n
        self.twin: list[int | None] = [None] * n
        self.solution: list[int] = [-1] * n
        self.trail: list[tuple[list[int], int, int]] = []
        self.dirty: dict[int, None] = {}  # an ordered set
        self.failed: set[tuple[tuple[int, int, int, bool], ...]] = set()
        if techniques.twins:
            last: dict[tuple[int, int, int], int] = {}
            for i in range(n):
                key = (self.lower[i], self.upper[i], self.size[i])
                before = last.get(key)
                if before is not None:
                    self.twin[i] = before
                    self.low[i] = self.low[before] + self.size[i]
                last[key] = i

    def ranked(self, ids: Sequence[int], order: str) -> list[tuple[int, int]]:
        """(buffer, rank) by the keys of the order, highest first."""
        life = self.problem.life

        def value(i: int, letter: str) -> float:
            width = self.upper[i] - self.lower[i]
            if letter == "T":
                return max(self.load[self.lower[i] : self.upper[i]])
            return {
                "W": float(life[i]),
                "A": float(life[i]) * self.size[i],
                "w": width,
                "a": float(width) * self.size[i],
                "Z": self.size[i],
            }[letter]

        by_key = sorted(
            ids,
            key=lambda i: (*(-value(i, letter) * self.jitter[i] for letter in order), i),
        )
        return [(i, rank) for rank, i in enumerate(by_key)]

    def shake(self, seed: int, start: int) -> None:
        """Factors of the ranking keys; start 0 ranks as the orders say."""
        base = _mix(seed * 0x9E3779B97F4A7C15 + start)
        for i in range(len(self.jitter)):
            u = (_mix(base + i) >> 11) / 2**53
            self.jitter[i] = 1.0 + SHAKE * (2.0 * u - 1.0) if start else 1.0

    def run(self, order: str, budget: int) -> bool:
        """True when a layout was found, False when there is none; raises _BudgetSpent."""
        self.budget, self.order = budget, order
        if max(self.size) > self.capacity or max(self.load) > self.capacity:
            return False
        self.dirty.clear()
        for begin, end in self._uncrossed(0, self.sections):
            ids = [i for i in range(self.problem.count) if begin <= self.lower[i] < end]
            if ids and not self.visit(begin, end, self.ranked(ids, order), 0, -1):
                return False
        return True

    def reset(self) -> None:
        """Back to nothing placed, after a search that was cut short; failed states stay."""
        while self.trail:
            values, index, value = self.trail.pop()
            values[index] = value
        self.unplaced = [True] * self.problem.count
        self.load = self.problem.loads()

    def _uncrossed(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The range cut wherever nothing unplaced crosses."""
        crossed: set[int] = set()
        for i, unplaced in enumerate(self.unplaced):
            if unplaced:
                crossed.update(range(self.lower[i] + 1, self.upper[i]))
        cuts = [begin, *(t for t in range(begin + 1, end) if t not in crossed), end]
        return list(itertools.pairwise(cuts))

    def _assign(self, values: list[int], index: int, value: int) -> None:
        self.trail.append((values, index, values[index]))
        values[index] = value

    def _raise_low(self, j: int, value: int) -> None:
        self._assign(self.low, j, value)
        for t in range(self.lower[j], self.upper[j]):
            self.dirty[t] = None

    def visit(
        self, begin: int, end: int, entries: list[tuple[int, int]], level: int, rank: int
    ) -> bool:
        """Places what is unplaced in the sections [begin, end), at or above (level, rank)."""
        if self.budget <= 0 or self.spent():
            raise _BudgetSpent
        self.budget -= 1
        self.nodes += 1
        entries = [(i, r) for i, r in entries if self.unplaced[i]]
        if not entries:
            return True
        limit = UNLIMITED
        if self.use.quick_reject:
            limit = self.capacity - max(self.load[begin:end])
        hole = UNLIMITED
        if self.use.dominance:
            hole = min(self.rest[i] + self.size[i] for i, _ in entries)
        candidates, state = [], []
        for i, r in entries:
            twin = self.twin[i]
            ready = (
                self.low[i] == self.rest[i]
                and (self.rest[i], r) > (level, rank)
                and (twin is None or not self.unplaced[twin])
            )
            if ready and self.rest[i] <= limit and self.rest[i] < hole:
                candidates.append((self.rest[i], r, i))
            state.append((i, self.rest[i], max(self.low[i], level), ready))
        key = tuple(sorted(state))
        if self.use.failed_states and key in self.failed:
            self.hits += 1
            return False
        for offset, r, i in sorted(candidates):
            found, alone = self.place(begin, end, entries, offset, r, i)
            if found:
                return True
            if alone and self.use.no_siblings:
                break
        if self.use.failed_states:
            self.failed.add(key)
        return False

    def place(
        self, begin: int, end: int, entries: list[tuple[int, int]], offset: int, rank: int, i: int
    ) -> tuple[bool, bool]:
        """(found a layout with i at offset, i has no unplaced neighbours)."""
        self.budget -= 1
        top = offset + self.size[i]
        if top > self.capacity:
            return False, True
        mark = len(self.trail)
        self.unplaced[i] = False
        for t in range(self.lower[i], self.upper[i]):
            self.load[t] -= self.size[i]
            self._assign(self.base, t, top)
            self.dirty[t] = None
        open_ = [j for j in self.neighbours[i] if self.unplaced[j]]
        fits = True
        for j in open_:
            if self.rest[j] < top:
                self._assign(self.rest, j, top)
            if self.low[j] < top:
                self._raise_low(j, top)
                fits = fits and top + self.size[j] <= self.capacity
        found = (
            fits
            and self.propagate(offset, rank, entries)
            and self.go_on(begin, end, entries, offset, rank)
        )
        if found:
            self.solution[i] = offset
        self.dirty.clear()
        while len(self.trail) > mark:
            values, index, value = self.trail.pop()
            values[index] = value
        for t in range(self.lower[i], self.upper[i]):
            self.load[t] += self.size[i]
        self.unplaced[i] = True
        return found, not open_

    def propagate(self, level: int, rank: int, entries: list[tuple[int, int]]) -> bool:
        for _ in range(PASSES):
            if self.use.lift and not self.lift(level, rank, entries):
                return False
            if not self.dirty or not (self.use.floors or self.use.unique):
                return True
            mark = len(self.trail)
            if not self.raise_floors(level):
                return False
            if all(values is not self.low for values, _, _ in self.trail[mark:]):
                return True
        return True

    def lift(self, level: int, rank: int, entries: list[tuple[int, int]]) -> bool:
        for j, r in entries:
            rest = self.rest[j]
            if not self.unplaced[j] or (self.low[j] == rest and (rest, r) > (level, rank)):
                continue
            tops = [
                max(self.low[k], level) + self.size[k]
                for k in self.neighbours[j]
                if self.unplaced[k] and max(self.low[k], level) < rest + self.size[j]
            ]
            if not tops or min(tops) + self.size[j] > self.capacity:
                return False
            if min(tops) > self.low[j]:
                self._raise_low(j, min(tops))
        return True

    def raise_floors(self, level: int) -> bool:
        while self.dirty:
            t = next(iter(self.dirty))
            del self.dirty[t]
            open_ = [j for j in self.members[t] if self.unplaced[j]]
            if not open_:
                continue
            limit = self.capacity - self.load[t]
            bounds = sorted((max(self.low[j], level), j) for j in open_)
            first, who = bounds[0]
            if first > self.base[t]:
                self._assign(self.base, t, first)
            if max(first, self.base[t]) > limit:
                return False
            if self.use.unique and len(bounds) > 1 and bounds[1][0] > limit:
                top = first + self.size[who]
                for _, j in bounds[1:]:
                    if self.low[j] < top:
                        if top + self.size[j] > self.capacity:
                            return False
                        self._raise_low(j, top)
        return True

    def go_on(
        self, begin: int, end: int, entries: list[tuple[int, int]], level: int, rank: int
    ) -> bool:
        self.dirty.clear()
        if not self.use.split:
            return self.visit(begin, end, entries, level, rank)
        ranges = self._uncrossed(begin, end)
        if len(ranges) == 1:
            return self.visit(begin, end, entries, level, rank)
        parts = []
        for a, b in ranges:
            slack = [
                self.capacity - max(self.base[t], level) - self.load[t]
                for t in range(a, b)
                if self.load[t] > 0
            ]
            if slack:
                parts.append((min(slack), a, b))
        if len(parts) == 1:
            return self.visit(parts[0][1], parts[0][2], entries, level, rank)
        for _, a, b in sorted(parts, key=lambda part: part[0]):
            mine = [(i, r) for i, r in entries if self.unplaced[i] and a <= self.lower[i] < b]
            if self.use.dynamic_order:
                ranked = self.ranked([i for i, _ in mine], self.order)
                found = self.visit(a, b, ranked, level, -1)
            else:
                found = self.visit(a, b, mine, level, rank)
            if not found:
                return False
        return True


def _mix(x: int) -> int:
    """A hash of 64 bits, as in csrc/canonical.cc."""
    x %= 2**64
    x ^= x >> 32
    x = x * 0xD6E8FEB86659FD93 % 2**64
    x ^= x >> 29
    x = x * 0x9FB21C651E98DF25 % 2**64
    return x ^ x >> 32


@dataclass
class _Line:
    starts: int = 0
    spent: int = 0


def search_reference(
    problem: Reduced,
    capacity: int,
    *,
    techniques: Techniques | None = None,
    orders: Sequence[str] = ORDERS,
    seed: int = 0,
    nodes: int = UNLIMITED,
    seconds: float = 1e9,
    stop: StopFlag | None = None,
) -> SearchResult:
    """The whole search in Python, from start to start.

    Two lines of starts share the work equally. The steady one goes round the orders with budgets
    that double; the shaken one ranks a little differently each time, with budgets that grow slowly.
    The work a search takes has a heavy tail: another start is often worth more than a longer one.
    """
    deadline = time.monotonic() + seconds

    def spent() -> bool:
        return bool(stop) or time.monotonic() > deadline

    state = _Reference(problem, capacity, techniques or Techniques(), spent)
    steady, shaken, left = _Line(), _Line(), nodes
    old_limit = sys.getrecursionlimit()
    # Python frames live on the heap; a buffer takes three of them.
    sys.setrecursionlimit(max(old_limit, 4 * problem.count + 1000))
    try:
        while True:
            line = shaken if steady.spent > shaken.spent else steady
            rounds, turn = divmod(line.starts, len(orders))
            share = (problem.count * 2 + 64) * (4 if line is shaken else 1)
            for _ in range(rounds):
                share = share * 6 // 5 if line is shaken else share * 2
            given = min(share, left)
            line.starts += 1
            state.shake(seed, line.starts if line is shaken else 0)
            outcome = Outcome.ABORTED
            with contextlib.suppress(_BudgetSpent):
                found = state.run(orders[turn], given)
                outcome = Outcome.FOUND if found else Outcome.INFEASIBLE
            used = given - state.budget
            left -= used
            line.spent += used
            if outcome is not Outcome.ABORTED or spent() or left <= 0:
                name = order_name(orders, turn + len(orders) * (line is shaken))
                offsets = state.solution if outcome is Outcome.FOUND else None
                return SearchResult(outcome, offsets, state.nodes, state.hits, name)
            state.reset()
    finally:
        sys.setrecursionlimit(old_limit)
