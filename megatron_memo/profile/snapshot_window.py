"""Which events of a recorded history are one training iteration.

Iterations repeat: the same requests in the same order. The window is found from that alone, as the
period of the longest stretch that repeats itself in full. Layers and micro-batches repeat too, but
what they repeat for is shorter than an iteration, so the longest stretch is that of iterations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Up to this many events every period is tried; beyond, the distances at which _GRAM events in a row
# come again most often.
_SHORT = 2048
_GRAM = 16
_CANDIDATES = 256


@dataclass(frozen=True)
class Repeat:
    """Events [start, stop) of a sequence repeat with a period.

    Attributes:
        period: event k equals event k + period, for all k in [start, stop - period).
    """

    start: int
    stop: int
    period: int

    @property
    def times(self) -> int:
        """How many full periods there are, at least 2."""
        return (self.stop - self.start) // self.period


def find_repeat(tokens: Sequence[Hashable]) -> Repeat | None:
    """The longest stretch that is at least two full periods, where it comes last; or None.

    Takes about n log n steps for n tokens.
    """
    known: dict[Hashable, int] = {}
    numbers = np.fromiter(
        (known.setdefault(token, len(known)) for token in tokens), np.int64, len(tokens)
    )
    best: Repeat | None = None
    for period in _candidates(numbers):
        found = _longest(numbers, int(period))
        if found is None:
            continue
        # Multiples of a period describe the same stretch: the smallest is the period.
        size, period_first = found.stop - found.start, -found.period
        if best is None or (size, period_first) > (best.stop - best.start, -best.period):
            best = found
    if best is None:
        return None
    return _last_like(numbers, best)


def iteration_start(repeat: Repeat, alive: Ints) -> int:
    """Where the last full period begins: at the fewest bytes, before the climb to the peak.

    A stretch of repeats can be cut into periods anywhere. Between two iterations no activation is
    alive, so that the fewest bytes are.

    Args:
        alive: bytes alive before each event.
    """
    first = repeat.stop - 2 * repeat.period
    around = alive[first : first + repeat.period]
    lowest = np.flatnonzero(around == around.min())
    before_peak = lowest[lowest <= int(around.argmax())]
    return first + int(before_peak[-1] if before_peak.size else lowest[-1])


def _candidates(numbers: Ints) -> Ints:
    """Periods to try."""
    if len(numbers) <= _SHORT:
        return np.arange(1, len(numbers) // 2 + 1)
    # Hashes only choose what is tried; what is found is compared event by event.
    factors = np.random.default_rng(0).integers(1, 2**62, size=_GRAM, dtype=np.int64) | 1
    hashes = np.zeros(len(numbers) - _GRAM + 1, np.int64)
    for place in range(_GRAM):
        hashes += (numbers[place : place + len(hashes)] + 1) * factors[place]
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    distances, votes = np.unique((order[1:] - order[:-1])[same], return_counts=True)
    return distances[np.argsort(-votes, kind="stable")[:_CANDIDATES]]


def _runs(numbers: Ints, period: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the stretches in which each event equals the one a period later."""
    differs = np.flatnonzero(numbers[:-period] != numbers[period:])
    edges = np.concatenate(([-1], differs, [len(numbers) - period]))
    return edges[:-1] + 1, np.diff(edges) - 1


def _longest(numbers: Ints, period: int) -> Repeat | None:
    starts, lengths = _runs(numbers, period)
    at = int(lengths.argmax())
    if lengths[at] < period:
        return None
    start = int(starts[at])
    return Repeat(start, start + int(lengths[at]) + period, period)


def _last_like(numbers: Ints, like: Repeat) -> Repeat:
    """The last stretch that repeats the same events as `like`, which may be `like` itself."""
    period = like.period
    content = np.sort(numbers[like.start : like.start + period])
    starts, lengths = _runs(numbers, period)
    for at in np.flatnonzero(lengths >= period)[::-1]:
        start = int(starts[at])
        if np.array_equal(np.sort(numbers[start : start + period]), content):
            return Repeat(start, start + int(lengths[at]) + period, period)
    return like
