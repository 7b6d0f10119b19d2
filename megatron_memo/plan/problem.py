"""The dynamic storage allocation (DSA) problem, and what can be said about it without solving.

Buffers with known lifetimes and sizes are to get offsets so that no two that are alive at once
overlap, below a capacity or with the lowest peak. Times and sizes are integers of any unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Beyond this a double no longer holds every integer, and other tools would read another number.
LARGEST = 2**53
# The compiled solvers add sizes in 64 bits.
LARGEST_SUM = 2**62


class ProblemError(ValueError):
    """The input is not a DSA problem. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """`size` units of memory from time `lower` to time `upper`, the end not included."""

    id: str
    lower: int
    upper: int
    size: int


@dataclass(frozen=True)
class Problem:
    """Buffers in the order of their source; capacity None means: the lowest peak is wanted.

    Raises ProblemError when there is nothing to solve or an entry makes no sense.
    """

    buffers: tuple[Buffer, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not self.buffers:
            raise ProblemError("there are no buffers to place")
        seen: set[str] = set()
        for buffer in self.buffers:
            check_buffer(buffer)
            if buffer.id in seen:
                raise ProblemError(f"buffer id {buffer.id!r} occurs twice")
            seen.add(buffer.id)
        if sum(buffer.size for buffer in self.buffers) > LARGEST_SUM:
            raise ProblemError(f"the sizes add up to more than {LARGEST_SUM} (2^62)")
        if self.capacity is not None:
            _check_capacity(self.capacity, self.buffers)

    @property
    def sizes(self) -> list[int]:
        return [buffer.size for buffer in self.buffers]


def check_buffer(buffer: Buffer) -> None:
    """Raises ProblemError when the buffer makes no sense."""
    lower, upper, size = buffer.lower, buffer.upper, buffer.size
    if 0 <= lower < upper <= LARGEST and 0 < size <= LARGEST:
        return
    name = f"buffer {buffer.id!r}"
    for what in ("lower", "upper", "size"):
        value = getattr(buffer, what)
        if value > LARGEST:
            raise ProblemError(f"{name}: {what} {value} is beyond {LARGEST} (2^53)")
    if lower < 0:
        raise ProblemError(f"{name}: lower is {lower}, times must not be negative")
    if lower >= upper:
        raise ProblemError(f"{name}: lower {lower} must come before upper {upper} (exclusive)")
    raise ProblemError(f"{name}: size is {size}, it must be at least 1")


def _check_capacity(capacity: int, buffers: Sequence[Buffer]) -> None:
    if capacity <= 0:
        raise ProblemError(f"the capacity is {capacity}, it must be at least 1")
    largest = max(buffers, key=lambda buffer: buffer.size)
    if largest.size > capacity:
        raise ProblemError(
            f"capacity {capacity} can't hold buffer {largest.id!r}, its size is {largest.size}"
        )


def section_loads(
    lower: Sequence[int], upper: Sequence[int], size: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The times between two events with the bytes alive in each: (start, end, load), by start."""
    change: dict[int, int] = {}
    for start, end, amount in zip(lower, upper, size, strict=True):
        change[start] = change.get(start, 0) + amount
        change[end] = change.get(end, 0) - amount
    times = sorted(change)
    sections, load = [], 0
    for start, end in itertools.pairwise(times):
        load += change[start]
        sections.append((start, end, load))
    return sections


def load_bound(problem: Problem) -> int:
    """The most bytes alive at once: no layout has a lower peak."""
    buffers = problem.buffers
    sections = section_loads(
        [b.lower for b in buffers], [b.upper for b in buffers], [b.size for b in buffers]
    )
    return max(load for _, _, load in sections)


def peak_of(problem: Problem, offsets: Sequence[int]) -> int:
    """The highest end of a buffer."""
    return max(at + b.size for at, b in zip(offsets, problem.buffers, strict=True))
