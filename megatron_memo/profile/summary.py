"""A trace in a few numbers."""

from __future__ import annotations

from megatron_memo.profile.trace import Enter, Free, Trace, rounded


def peaks(trace: Trace) -> dict[str, int]:
    """Most bytes of the window's own requests alive at once in each part of the iteration.

    Returns:
        Bytes, rounded as the allocator does, by "embedding forward", "layer backward" and the like,
        in the order of their first appearance.
    """
    found: dict[str, int] = {}
    sizes: dict[int, int] = {}
    alive = 0
    where = _name(trace, 0)
    for event in trace.events:
        if isinstance(event, Enter):
            where = _name(trace, event.phase)
        elif isinstance(event, Free):
            alive -= sizes.pop(event.id, 0)
        else:
            sizes[event.id] = rounded(event.size, trace.header.rounding)
            alive += sizes[event.id]
            found[where] = max(found.get(where, 0), alive)
    return found


def _name(trace: Trace, number: int) -> str:
    phase = trace.phases[number]
    return f"{phase.part} {phase.direction}".strip()
