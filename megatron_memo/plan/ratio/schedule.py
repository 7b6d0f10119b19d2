"""What a pipeline schedule means for a step's time (what it holds in memory: `layer.in_flight`)."""

from __future__ import annotations

# Layers whose copies are under way when a pass turns from forward to backward.
_AT_THE_TURN = 2


def passes(stages: int, micro_batches: int, virtual: int | None = None) -> float:
    """Micro-batches one after another in a step, and the bubble counted in micro-batches."""
    return micro_batches + (stages - 1) / (virtual or 1)


def both_share(swapping: int, in_flight: float) -> float:
    """Part of a pass's copies that meets copies of the other direction.

    With one micro-batch at a time forward's copies are over when backward's begin. With several,
    the last layers' copies out meet the first ones' way back of another micro-batch.

    Args:
        swapping: layers of the stage that swap.
        in_flight: micro-batches between forward and backward.
    """
    if in_flight <= 1 or swapping == 0:
        return 0.0
    return min(_AT_THE_TURN / swapping, 1.0)
