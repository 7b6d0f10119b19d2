"""Pieces of one stretch of bytes: taken where they fit best, given back, joined again."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Keeps the books of a stretch of `nbytes`; touches no memory.

    The same takes and gives in the same order lead to the same offsets, so an iteration that runs
    like the last one finds its places as they were. Backward gives back in the reverse order of
    forward's takes, which leaves no gaps.

    Args:
        nbytes: of the stretch.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.taken = 0
        self._free: list[tuple[int, int]] = [
            (0, nbytes)
        ]  # (start, length), in order, no neighbours

    def take(self, nbytes: int) -> int | None:
        """The start of a free piece, in the smallest gap that has room, the first of equals; None
        if no gap has."""
        fitting = [(length, start) for start, length in self._free if length >= nbytes]
        if not fitting:
            return None
        length, start = min(fitting)
        at = bisect_left(self._free, (start, length))
        rest = (start + nbytes, length - nbytes)
        self._free[at : at + 1] = [rest] if rest[1] else []
        self.taken += nbytes
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        """The piece that `take(nbytes)` gave at `start` is free again."""
        at = bisect_left(self._free, (start, 0))
        stop = start + nbytes
        if at < len(self._free) and self._free[at][0] == stop:
            stop += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, stop - start))
        self.taken -= nbytes
