"""What the arms of the portfolio share: best layout, proven bound, and whether to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .native import StopFlag
from .problem import Problem, load_bound
from .reduced import Reduced, reduce_problem
from .verify import verify_layout


@dataclass(frozen=True)
class Incumbent:
    """The best verified layout so far, in real sizes."""

    offsets: tuple[int, ...]
    peak: int
    found_by: str
    seconds: float  # after the start


class Board:
    """Thread-safe. Arms work in units of the reduced problem; the outside sees real sizes.

    `goal` is what makes an arm's layout the last one needed: the capacity, or the proven bound.
    """

    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        progress: Callable[[Incumbent, int], None] | None = None,
    ) -> None:
        """`progress(best, bound)` is called at every better layout, from any thread."""
        self.problem = problem
        self._progress = progress
        buffers = problem.buffers
        self._lower = [b.lower for b in buffers]
        self._upper = [b.upper for b in buffers]
        self._size = [b.size for b in buffers]
        self._ids = [b.id for b in buffers]
        self.reduced: Reduced = reduce_problem(self._lower, self._upper, self._size)
        self.stop = StopFlag()
        self.started = time.monotonic()
        self.deadline = self.started + time_limit
        self.best: Incumbent | None = None
        self.bound = load_bound(problem)
        self.bound_by = "load"
        self._changed = threading.Condition()

    @property
    def goal(self) -> int:
        """In units."""
        wanted = self.bound if self.problem.capacity is None else self.problem.capacity
        return wanted // self.reduced.unit

    @property
    def ceiling(self) -> int:
        """In units: a layout that ends at or below this is news."""
        if self.best is None:
            return 2**62
        return self.best.peak // self.reduced.unit - 1

    @property
    def infeasible(self) -> bool:
        """Proven: no layout below the capacity."""
        return self.problem.capacity is not None and self.bound > self.problem.capacity

    @property
    def decided(self) -> bool:
        if self.infeasible:
            return True
        return self.best is not None and self.best.peak <= max(
            self.bound, self.problem.capacity or 0
        )

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def going(self) -> bool:
        """False when the arms should come home."""
        if not self.stop and (self.decided or self.seconds_left <= 0):
            self.halt()
        return not self.stop

    def halt(self) -> None:
        with self._changed:
            self.stop.set()
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until something changes, or the time is over."""
        with self._changed:
            if not self.stop:
                self._changed.wait(seconds)

    def offer(self, offsets: Sequence[int] | None, found_by: str) -> bool:
        """An arm's layout, in units. Verified before it counts; True when it is the best so far."""
        if offsets is None:
            return False
        real = tuple(at * self.reduced.unit for at in offsets)
        peak = max(at + size for at, size in zip(real, self._size, strict=True))
        if self.best is not None and peak >= self.best.peak:
            return False
        verify_layout(self._ids, self._lower, self._upper, self._size, real)
        with self._changed:
            if self.best is not None and peak >= self.best.peak:
                return False
            self.best = Incumbent(real, peak, found_by, time.monotonic() - self.started)
            if self._progress is not None:
                self._progress(self.best, self.bound)
            self._changed.notify_all()
        self.going()
        return True

    def prove(self, bound: int, proven_by: str) -> None:
        """No layout has a peak below `bound` units."""
        with self._changed:
            if bound * self.reduced.unit > self.bound:
                self.bound = bound * self.reduced.unit
                self.bound_by = proven_by
                self._changed.notify_all()
        self.going()
