"""Who wants to know when a segment is computed again, which the phase markers do not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watcher = Callable[[bool], None]

_watcher: Watcher | None = None


@contextmanager
def recomputing() -> Iterator[None]:
    """The body is a recomputation; the watcher hears True before it and False after it."""
    watcher = _watcher
    if watcher is None:
        yield
        return
    watcher(True)
    try:
        yield
    finally:
        watcher(False)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """`watcher` hears of recomputations inside the body. There is one at a time."""
    global _watcher
    assert _watcher is None, "recomputations are being watched already"
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
