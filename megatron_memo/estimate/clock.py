"""Streams of one rank: what runs when, and what compute stood still for.

A stream runs one thing at a time, in the order in which things are given to it, as CUDA's do.
`Clock` turns that into arithmetic: each stream is known by the time at which it is free. As the
order never depends on how long something takes, every time is a maximum of sums: what takes longer
never makes the whole shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_memo.phases import Phase

COMPUTE, D2H, H2D = "compute", "D2H", "H2D"
DISK_WRITE, DISK_READ = "disk write", "disk read"
TP, CP, PP, DP = "tp", "cp", "pp", "dp"
STREAMS = (COMPUTE, D2H, H2D, DISK_WRITE, DISK_READ, TP, CP, PP, DP)


class Event(NamedTuple):
    """Something that ran. Seconds since the iteration began.

    Attributes:
        stage: pipeline stage of the rank.
        stream: of `STREAMS`.
        start, seconds: when and how long.
        name: what, in words.
        phase: the phase it belongs to.
        nbytes: moved, for a copy.
    """

    stage: int
    stream: str
    start: float
    seconds: float
    name: str
    phase: Phase
    nbytes: int = 0


@dataclass
class Clock:
    """The streams of one rank.

    Attributes:
        stage: pipeline stage.
        free: when each stream has done what it was given.
        busy: seconds that each stream ran.
        exposed: seconds that compute stood still, by the stream that it waited for.
        events: what ran, in the order in which it was given.
    """

    stage: int
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS[1:], 0.0))
    events: list[Event] = field(default_factory=list)

    @property
    def now(self) -> float:
        """When compute has done what it was given."""
        return self.free[COMPUTE]

    def run(
        self,
        stream: str,
        seconds: float,
        name: str,
        phase: Phase,
        after: float = 0.0,
        nbytes: int = 0,
    ) -> float:
        """Gives a stream something to do, not before `after`; when it will be done."""
        if seconds <= 0:
            return max(self.free[stream], after) if nbytes else after
        start = max(self.free[stream], after)
        self.free[stream] = end = start + seconds
        self.busy[stream] += seconds
        self.events.append(Event(self.stage, stream, start, seconds, name, phase, nbytes))
        return end

    def compute(self, seconds: float, name: str, phase: Phase) -> float:
        """Gives compute something to do; when it will be done."""
        return self.run(COMPUTE, seconds, name, phase)

    def wait(self, stream: str, until: float) -> None:
        """Compute goes on when `stream` has come to the time `until`."""
        if until > self.free[COMPUTE]:
            self.exposed[stream] += until - self.free[COMPUTE]
            self.free[COMPUTE] = until

    @property
    def end(self) -> float:
        """When all streams are through."""
        return max(self.free.values())
