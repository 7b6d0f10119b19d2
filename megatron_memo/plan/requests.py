"""What one trace asks of a plan: its requests in order, and which of them a plan can place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron_memo.phases import Phase
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, Trace, rounded

from .problem import Buffer, Problem


class Request(NamedTuple):
    """One request for memory.

    Attributes:
        phase: index of the phase it is made in.
        size: bytes asked for, before rounding.
        stream: it is made on.
        lower, upper: alive in [lower, upper), positions among the trace's events; upper is None for
            a block that outlives the window.
    """

    phase: int
    size: int
    stream: int
    lower: int
    upper: int | None


@dataclass(frozen=True)
class Requests:
    """The requests of one trace.

    Attributes:
        header: of the trace.
        phases: `Request.phase` counts in them.
        requests: all of them, in order.
        stream: the one whose requests can be planned: the one with most bytes.
        smallest: requests that are below it when rounded are left to the native allocator.
        planned: indices of the requests that a plan places.
    """

    header: Header
    phases: tuple[Phase, ...]
    requests: tuple[Request, ...]
    stream: int
    smallest: int
    planned: tuple[int, ...]

    def problem(self, capacity: int | None = None) -> Problem:
        """The planned requests as a DSA problem; buffer k is request `planned[k]`.

        Raises ProblemError when there is none.
        """
        rounding = self.header.rounding
        buffers = []
        for k in self.planned:
            _, size, _, lower, upper = self.requests[k]
            assert upper is not None
            buffers.append(Buffer(str(k), lower, upper, rounded(size, rounding)))
        return Problem(tuple(buffers), capacity)

    def native_bytes(self) -> tuple[int, int]:
        """Bytes that the native allocator serves, rounded: (most alive at once, alive at the
        end of the window)."""
        planned = set(self.planned)
        change: list[tuple[int, int]] = []
        for k, (_, size, _, lower, upper) in enumerate(self.requests):
            if k not in planned:
                amount = rounded(size, self.header.rounding)
                change.append((lower, amount))
                if upper is not None:
                    change.append((upper, -amount))
        alive = most = 0
        for _, amount in sorted(change):
            alive += amount
            most = max(most, alive)
        return most, alive


def requests_of(trace: Trace, smallest: int | None = None) -> Requests:
    """Reads the requests off a trace.

    Args:
        smallest: bytes, see `Requests.smallest`; the allocator's rounding unit if left out, which
            leaves none out.
    """
    rounding = trace.header.rounding
    if smallest is None:
        smallest = rounding
    ends = {event.id: time for time, event in enumerate(trace.events) if isinstance(event, Free)}
    requests: list[Request] = []
    weight: Counter[int] = Counter()
    phase = 0
    for time, event in enumerate(trace.events):
        if isinstance(event, Enter):
            phase = event.phase
        elif isinstance(event, Malloc):
            upper = ends.get(event.id)
            requests.append(Request(phase, event.size, event.stream, time, upper))
            if upper is not None:
                weight[event.stream] += event.size
    # A window in which everything persists has no stream to plan; any will do.
    stream = weight.most_common(1)[0][0] if weight else 0
    planned = tuple(
        k
        for k, request in enumerate(requests)
        if request.stream == stream
        and request.upper is not None
        and rounded(request.size, rounding) >= smallest
    )
    return Requests(trace.header, trace.phases, tuple(requests), stream, smallest, planned)
