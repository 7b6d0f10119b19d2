"""Seconds and loss of a run's steps, in bounded memory whatever its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MOST = 4096  # entries; when there are more, neighbours become one


@dataclass
class Entry:
    """One step, or the mean of several.

    Attributes:
        first, last: iterations, from 1.
        steps: how many.
        seconds: of each of them.
        loss: mean over those that have one; None where none has. A number, or a tensor of one
            element until somebody asks for it: reading it would make the device wait.
    """

    first: int
    last: int
    steps: int
    seconds: float
    loss: Any


class History:
    """Entries in the order of their iterations."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, iteration: int, seconds: float, loss: Any) -> None:
        """A step that has ended. `loss` is as in `Entry`."""
        self._entries.append(Entry(iteration, iteration, 1, seconds, loss))
        if len(self._entries) > _MOST:
            entries = self.entries()
            pairs = zip(entries[::2], entries[1::2], strict=False)
            left = entries[len(entries) // 2 * 2 :]
            self._entries = [*(_joined(one, other) for one, other in pairs), *left]

    def entries(self) -> list[Entry]:
        """All of them, their losses read."""
        for entry in self._entries:
            entry.loss = None if entry.loss is None else float(entry.loss)
        return list(self._entries)


def _joined(one: Entry, other: Entry) -> Entry:
    steps = one.steps + other.steps
    known = [entry for entry in (one, other) if entry.loss is not None]
    count = sum(entry.steps for entry in known)
    loss = sum(entry.loss * entry.steps for entry in known) / count if known else None
    seconds = (one.seconds * one.steps + other.seconds * other.steps) / steps
    return Entry(one.first, other.last, steps, seconds, loss)
