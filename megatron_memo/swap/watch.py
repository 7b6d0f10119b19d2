"""Who wants to know of copies as they are made: for a trace of a real iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_memo.swap.backend import Copy

# Direction, marks of its beginning and its end (as `training.layer_times` has its clocks: seconds,
# or events on the copy's stream), bytes. Called on whatever thread copies or enqueues the copy.
Listener = Callable[[str, Any, Any, int], None]

TO_HOST, TO_DEVICE = "D2H", "H2D"

_listener: Listener | None = None


def tell(direction: str, start: Any, end: Any, copies: Sequence[Copy]) -> None:
    """A batch of copies; costs a comparison where nobody listens."""
    listener = _listener
    if listener is not None:
        listener(direction, start, end, sum(copy.device.numel() for copy in copies))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` hears of copies made inside the body. There is one at a time."""
    global _listener
    assert _listener is None, "copies are being watched already"
    _listener = listener
    try:
        yield
    finally:
        _listener = None
