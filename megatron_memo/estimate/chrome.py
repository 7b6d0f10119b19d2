"""A simulated iteration as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_memo.estimate.clock import STREAMS, Event
from megatron_memo.estimate.result import Result

_NANOSECONDS = 1e9
_TO_MICROSECONDS = 1e-3


def chrome_trace(result: Result) -> dict[str, Any]:
    """The trace as plain values for `json.dump`: a process a pipeline stage, a thread a stream.

    Times are microseconds since the iteration began, rounded to nanoseconds. Streams that did
    nothing are left out.
    """
    events = [
        row
        for stage in result.stages
        for row in chrome_events(stage.stage, f"pipeline stage {stage.stage}", stage.events)
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "strategy": result.strategy,
            "step seconds": result.seconds,
            "MFU, causal": result.mfu_causal,
            "MFU, full": result.mfu_full,
        },
        "traceEvents": events,
    }


def chrome_events(process: int, name: str, events: Sequence[Event]) -> list[dict[str, Any]]:
    """One process of a trace: its name, a thread for each stream that did anything, its events."""
    own = {"pid": process}
    rows: list[dict[str, Any]] = [{**own, "ph": "M", "name": "process_name", "args": _named(name)}]
    used = {event.stream for event in events}
    for number, stream in enumerate(STREAMS):
        if stream in used:
            thread = {**own, "tid": number, "ph": "M"}
            rows.append({**thread, "name": "thread_name", "args": _named(stream)})
            order = {"sort_index": number}
            rows.append({**thread, "name": "thread_sort_index", "args": order})
    for event in events:
        start = round(event.start * _NANOSECONDS)
        end = round((event.start + event.seconds) * _NANOSECONDS)
        told: dict[str, Any] = {"phase": str(event.phase)}
        if event.nbytes:
            told["bytes"] = event.nbytes
            told["GB/s"] = round(event.nbytes / event.seconds / 1e9, 3)
        rows.append(
            {
                **own,
                "tid": STREAMS.index(event.stream),
                "ph": "X",
                "name": event.name if event.nbytes else f"{event.phase}: {event.name}",
                "cat": event.stream,
                "ts": start * _TO_MICROSECONDS,
                "dur": (end - start) * _TO_MICROSECONDS,
                "args": told,
            }
        )
    return rows


def _named(name: str) -> dict[str, str]:
    return {"name": name}
