"""Streams and events of a device that has finished every operation by the time it returns.

Waiting is therefore never needed and ``query()`` is always true; elapsed times are wall-clock.
Can go when Megatron asks for streams through ``torch.Stream`` / ``torch.accelerator``.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Stream:
    """Stands for ``torch.cuda.Stream``; all operations are harmless."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority: there is one."""
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending on ``stream``."""

    def wait_event(self, event: Any) -> None:
        """``event`` has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (or a new one) and return it."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Everything submitted has completed."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


class Event:
    """Stands for ``torch.cuda.Event``; keeps the time of ``record()`` so that timers are real."""

    def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Remember now."""
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """The event has happened."""

    def synchronize(self) -> None:
        """The event has happened."""

    def query(self) -> bool:
        """The event has happened."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event's record to ``end_event``'s.

        Raises:
            RuntimeError: one of the two was never recorded, as CUDA's events do.
        """
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before asking for the elapsed time")
        return (end_event._time - self._time) * 1e3


class StreamContext:
    """Stands for the context manager of ``torch.cuda.stream(...)``."""

    def __init__(self, target: Any = None) -> None:
        self.target = target

    def __enter__(self) -> Any:
        return self.target

    def __exit__(self, *exc: Any) -> None:
        return None


THE_STREAM = Stream()
"""The one stream there is: what ``current_stream()`` and ``default_stream()`` return."""
