"""Where in an iteration a process is: the markers that a trace and a plan are keyed by.

The layer, the embedding, the head and the optimizer step say `enter(...)` as they begin. Whoever
profiles or replays an iteration listens; without a listener a marker costs one comparison. A phase
lasts until the next one begins, on whatever thread.

NOTE: micro-batches are counted here. `begin_iteration` starts at none, `begin_micro_batch` is
called when a model chunk's training forward begins and returns the number that its layers carry
into their backward. Each model chunk (virtual pipeline stage) counts for itself, so a number never
depends on how a schedule interleaves chunks, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
# Parts of a model and of an iteration, in the order in which forward meets them.
EMBEDDING, LAYER, HEAD, OTHER = "embedding", "layer", "head", "other"
# What follows backward: the gradients' norm and clipping, then the optimizer's own step. Whether
# gradients are clipped depends on them, so the two are kept apart.
OPTIMIZER, UPDATE = "optimizer", "update"
# Inside a collective that asks for memory of its own, which no plan can serve (see platform).
COLLECTIVE = "collective"
PARTS = (EMBEDDING, LAYER, HEAD, OPTIMIZER, UPDATE, OTHER, COLLECTIVE)


class Phase(NamedTuple):
    """A stretch of an iteration. Fields that do not apply are None (direction: "").

    Attributes:
        part: one of `PARTS`.
        direction: "forward", "backward" or "". Recomputation belongs to backward.
        micro_batch: from 0 in each iteration, by model chunk.
        layer: Megatron's global `layer_number`, from 1.
        chunk: token chunk of the layer, from 0; None outside of the chunked steps.
        stage: virtual pipeline stage of the model chunk; None if there is only one.
    """

    part: str
    direction: str = ""
    micro_batch: int | None = None
    layer: int | None = None
    chunk: int | None = None
    stage: int | None = None

    def __str__(self) -> str:
        words = [f"layer {self.layer}" if self.layer is not None else self.part]
        if self.chunk is not None:
            words.append(f"chunk {self.chunk}")
        if self.direction:
            words.append(self.direction)
        if self.micro_batch is not None:
            words.append(f"of micro-batch {self.micro_batch}")
        if self.stage is not None:
            words.append(f"on virtual stage {self.stage}")
        return " ".join(words)


START = Phase(OTHER)  # what an iteration is in before anything said otherwise

Listener = Callable[[Phase], None]

_listeners: tuple[Listener, ...] = ()
_current = START
_micro_batches: dict[int | None, int] = {}


def enter(phase: Phase) -> None:
    """The process is in `phase` from here on; saying so again changes nothing."""
    global _current
    if _listeners and phase != _current:
        _current = phase
        for listener in _listeners:
            listener(phase)


@contextmanager
def interrupted_by(part: str) -> Iterator[None]:
    """The body belongs to `part`; after it the process is in the phase that it was in."""
    before = _current
    enter(Phase(part))
    try:
        yield
    finally:
        enter(before)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener(phase)` whenever the phase changes inside the body.

    The body begins in START; in the phase that others hear already if there are any.
    """
    global _listeners, _current
    if not _listeners:
        _current = START
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(other for other in _listeners if other is not listener)


def begin_iteration() -> None:
    """Counts micro-batches from 0 again, and enters START."""
    _micro_batches.clear()
    enter(START)


def begin_micro_batch(stage: int | None = None) -> int:
    """The number of the micro-batch whose training forward begins on this model chunk."""
    number = _micro_batches.get(stage, -1) + 1
    _micro_batches[stage] = number
    return number


def current_micro_batch(stage: int | None = None) -> int:
    """The number that `begin_micro_batch` gave last; 0 where nobody counts."""
    return _micro_batches.get(stage, 0)
