"""From what the allocator recorded to a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_memo.allocator import library as abi
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.phases import START, Phase
from megatron_memo.profile.trace import Enter, Event, Free, Header, Malloc, Trace


def to_trace(raw: np.ndarray, phases: Mapping[int, Phase], header: Header) -> Trace:
    """The trace of the last whole iteration in a recording.

    Args:
        raw: from `Allocator.stop_recording`.
        phases: what each number given to `enter` stood for.
        header: of the trace; `rounding` is the allocator's `alignment`.

    Returns:
        A trace whose blocks have the recording's ids. Frees after the iteration's end are left out:
        those blocks outlive the window. A block of an earlier iteration of the recording that lives
        into the window is held.

    Raises:
        AllocatorError: the recording holds no whole iteration, or a phase is not in `phases`.
        TraceError: the iteration has no request.
    """
    begin, end = _window(raw["kind"])
    held = _alive(raw[:begin])
    table = {START: 0}
    events: list[Event] = []
    for kind, number, block, size, stream, _thread in raw[begin + 1 : end].tolist():
        if kind == abi.MALLOC:
            events.append(Malloc(block, size, stream, ""))
        elif kind == abi.FREE:
            events.append(Free(block))
        elif number != abi.NO_PHASE:
            if number not in phases:
                raise AllocatorError(f"the recording enters phase {number}, which nobody named")
            events.append(Enter(table.setdefault(phases[number], len(table))))
    return Trace(header, tuple(table), tuple(events), held)


def _window(kinds: Sequence[int] | np.ndarray) -> tuple[int, int]:
    """Positions of the last end of an iteration and of the begin before it."""
    ends = np.flatnonzero(np.asarray(kinds) == abi.ITERATION_END)
    for end in ends[::-1].tolist():
        begins = np.flatnonzero(np.asarray(kinds[:end]) == abi.ITERATION_BEGIN)
        if begins.size:
            return int(begins[-1]), int(end)
    raise AllocatorError("the recording of memory requests holds no whole iteration")


def _alive(before: np.ndarray) -> tuple[Malloc, ...]:
    alive: dict[int, Malloc] = {}
    for kind, _phase, block, size, stream, _thread in before.tolist():
        if kind == abi.MALLOC:
            alive[block] = Malloc(block, size, stream, "")
        elif kind == abi.FREE:
            alive.pop(block, None)
    return tuple(alive.values())
