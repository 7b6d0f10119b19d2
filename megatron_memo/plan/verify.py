"""The independent check of a layout: a sweep over time that shares no code with the solvers.

At every moment the live buffers are kept sorted by offset. They were disjoint before a buffer came
in, so it can only overlap the one before it and the one after it in that order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


class LayoutError(ValueError):
    """A layout is wrong; the message names the first buffers at fault."""


@dataclass(frozen=True)
class Verified:
    """What the sweep saw of a layout without faults."""

    buffers: int
    peak: int
    most_alive: int  # the largest sum of live sizes: no layout can have a lower peak


def verify_layout(
    ids: Sequence[str],
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    offsets: Sequence[int | None],
    *,
    capacity: int | None = None,
    alignment: int = 1,
) -> Verified:
    """Raises LayoutError when a buffer has no offset, a negative or misaligned one, ends above the
    capacity, or shares bytes with another that is alive at the same time."""
    if not len(ids) == len(lower) == len(upper) == len(size) == len(offsets):
        raise LayoutError(f"{len(offsets)} offsets for {len(ids)} buffers")
    peak = 0
    for name, amount, offset in zip(ids, size, offsets, strict=True):
        if offset is None or isinstance(offset, bool) or not isinstance(offset, int):
            raise LayoutError(f"buffer {name!r} has no integer offset but {offset!r}")
        if offset < 0:
            raise LayoutError(f"buffer {name!r} has the negative offset {offset}")
        if offset % alignment:
            raise LayoutError(f"offset {offset} of buffer {name!r} is no multiple of {alignment}")
        if capacity is not None and offset + amount > capacity:
            raise LayoutError(
                f"buffer {name!r} ends at {offset + amount}, above the capacity {capacity}"
            )
        peak = max(peak, offset + amount)
    # Ends before beginnings at equal times: `upper` is exclusive.
    events = sorted(
        [(time, 1, k) for k, time in enumerate(lower)]
        + [(time, 0, k) for k, time in enumerate(upper)]
    )
    live: list[tuple[int, int]] = []  # (offset, buffer)
    alive = most_alive = 0
    for time, begins, k in events:
        entry = (int(offsets[k] or 0), k)
        place = bisect.bisect_left(live, entry)
        if not begins:
            if place == len(live) or live[place] != entry:
                raise LayoutError(f"buffer {ids[k]!r} ends at {time}, before it begins")
            live.pop(place)
            alive -= size[k]
            continue
        for other_place in (place - 1, place):
            if 0 <= other_place < len(live):
                at, other = live[other_place]
                if at < entry[0] + size[k] and entry[0] < at + size[other]:
                    raise LayoutError(
                        f"buffers {ids[other]!r} ({at} to {at + size[other]}) and {ids[k]!r} "
                        f"({entry[0]} to {entry[0] + size[k]}) overlap at time {time}"
                    )
        live.insert(place, entry)
        alive += size[k]
        most_alive = max(most_alive, alive)
    return Verified(len(ids), peak, most_alive)
