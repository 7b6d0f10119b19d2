"""A plan as a memory snapshot of PyTorch: planned blocks in the viewers people know.

What is written loads in https://pytorch.org/memory_viz and in torch/cuda/_memory_viz.py; for the
format see `snapshot`. The arena is one segment at a made-up address; each planned request of one
window is a block in it, at its offset, from its malloc to its free. Its frames say where it belongs
and which lines of the plan file say so:

    it.plan.jsonl:43:layer 3 chunk 1 backward of micro-batch 0
    it.plan.jsonl:1234:request 17 of window 0

NOTE: requests without an offset are left out. The native allocator places them where it likes, and
an address made up for them would show memory that nobody reserved. They are counted in the
snapshot's ``external_annotations``.

NOTE: the web viewer replays a history backwards from the state at its end, and takes the name of a
block from its free. So a free carries the frames of its malloc, where torch's own would carry those
of whoever gave the block up; and no block may lie outside of a segment. It reads pickles of the
protocols 2 to 4, and joins the two halves of a free only where they follow each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from megatron_memo.plan.atomic_file import whole_file
from megatron_memo.plan.plan_file import Entry, Plan, PlanError, Window

from .snapshot import ALLOC, ASKED_FREE, DONE_FREE, Record
from .trace import rounded

BASE = 0x7F0000000000  # where the arena is said to begin: an address as CUDA's are
DEVICE = 0  # a plan doesn't know the index of its device
PROTOCOL = 4
POOL = (0, 0)  # the default one

SEGMENT_ALLOC = "segment_alloc"


@dataclass(frozen=True)
class Shown:
    """What a snapshot shows of a plan's window.

    Attributes:
        window: its index in the plan.
        planned: blocks shown; `planned_bytes` their sizes together, as asked for.
        native: requests left out, which the native allocator serves; `native_bytes` likewise.
        top: bytes from the arena's beginning to the highest end of a block shown.
    """

    window: int
    planned: int
    planned_bytes: int
    native: int
    native_bytes: int
    top: int

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """In words, for a reader of the snapshot."""
        window = plan.windows[self.window]
        return (
            f"window {self.window} ({window.source}) of a plan for rank {plan.rank} of "
            f"{plan.world_size} by {plan.made_by}; addresses are made up, time_us is the position "
            "in the trace",
            f"{self.planned} planned requests, {self.planned_bytes:,} bytes over the iteration, "
            f"in the first {self.top:,} bytes of the arena's {plan.arena:,}",
            f"left out: {self.native} requests, {self.native_bytes:,} bytes over the iteration, "
            "which the native allocator serves",
        )


def fullest_window(plan: Plan) -> int:
    """Index of the first window that needs most of the arena."""
    tops = [_top(plan, window) for window in plan.windows]
    return tops.index(max(tops))


def shown(plan: Plan, number: int) -> Shown:
    """What `snapshot_of` shows of this window.

    Raises:
        PlanError: there is no such window, or nothing is planned in it.
    """
    if not 0 <= number < len(plan.windows):
        known = ", ".join(f"{k} ({window.source})" for k, window in enumerate(plan.windows))
        raise PlanError(f"--window {number}: the plan has no such window, only {known}")
    window = plan.windows[number]
    planned = [entry.size for entry in window.entries if entry.offset is not None]
    native = [entry.size for entry in window.entries if entry.offset is None]
    if not planned:
        raise PlanError(
            f"--window {number}: nothing is planned in it ({window.source}), so there is nothing "
            "to show; choose another one"
        )
    top = _top(plan, window)
    return Shown(number, len(planned), sum(planned), len(native), sum(native), top)


def snapshot_of(plan: Plan, number: int, name: str) -> Record:
    """The dictionary that ``torch.cuda.memory._snapshot()`` would return.

    Args:
        plan: a verified one: see `plan_file.load_plan`.
        number: which of its windows.
        name: of the plan's file, for the frames.

    Raises:
        PlanError: see `shown`.
    """
    seen = shown(plan, number)
    window = plan.windows[number]
    arena = [_frame(name, 1, f"arena of a memory plan, {plan.arena} bytes")]
    return {
        "segments": [_segment(plan.arena, window.stream, arena)],
        "device_traces": [
            [
                _event(SEGMENT_ALLOC, 0, BASE, plan.arena, window.stream, arena),
                *_history(plan, number, name),
            ]
        ],
        "allocator_settings": {},
        "external_annotations": [
            {"name": note, "device": DEVICE, "time_us": 0} for note in seen.notes(plan)
        ],
    }


def export_snapshot(path: Path, plan: Plan, number: int, name: str) -> None:
    """Writes `snapshot_of` these, whole or not at all.

    Raises:
        PlanError: see `shown`; or the file can't be written.
    """
    snapshot = snapshot_of(plan, number, name)
    try:
        with whole_file(path) as stream:
            # A pickle is bytes: they go below the layer that would encode text.
            pickle.dump(snapshot, cast(TextIO, stream).buffer, PROTOCOL)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error


def _history(plan: Plan, number: int, name: str) -> Iterator[Record]:
    """Requests and frees in the order of the trace; at one time, frees come first."""
    window = plan.windows[number]
    begin = _first_line(plan, number)
    phases = [_frame(name, begin + k, str(p)) for k, p in enumerate(window.phases, start=1)]
    begin += len(window.phases) + 1
    timed: list[tuple[int, bool, int]] = []
    for k, entry in enumerate(window.entries):
        if entry.offset is not None:
            assert entry.upper is not None  # a verified plan places no block that outlives it
            timed += [(entry.lower, True, k), (entry.upper, False, k)]
    frames: dict[int, list[Record]] = {}
    for time, begins, k in sorted(timed):
        entry = window.entries[k]
        if begins:
            request = _frame(name, begin + k, f"request {k} of window {number}")
            frames[k] = [phases[entry.phase], request]
            yield _block_event(ALLOC, time, entry, frames[k])
        else:
            yield _block_event(ASKED_FREE, time, entry, frames[k])
            yield _block_event(DONE_FREE, time, entry, frames.pop(k))


def _first_line(plan: Plan, number: int) -> int:
    """The line of the plan file, from 1, in which a window begins: see `plan_file`."""
    before = plan.windows[:number]
    return 2 + sum(1 + len(window.phases) + len(window.entries) for window in before)


def _top(plan: Plan, window: Window) -> int:
    return max(
        (e.offset + rounded(e.size, plan.rounding) for e in window.entries if e.offset is not None),
        default=0,
    )


def _frame(filename: str, line: int, name: str) -> Record:
    return {"filename": filename, "line": line, "name": name}


def _block_event(action: str, time: int, entry: Entry, frames: list[Record]) -> Record:
    assert entry.offset is not None
    return _event(action, time, BASE + entry.offset, entry.size, entry.stream, frames)


def _event(
    action: str, time: int, address: int, size: int, stream: int, frames: list[Record]
) -> Record:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": time,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": frames,
        "pool_id": POOL,
    }


def _segment(size: int, stream: int, frames: list[Record]) -> Record:
    """The arena at the end of the iteration, when every planned block was given back."""
    empty = {
        "address": BASE,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
    return {
        "device": DEVICE,
        "address": BASE,
        "total_size": size,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": POOL,
        "is_expandable": False,
        "frames": frames,
        "blocks": [empty],
    }
