"""How Megatron's pipeline schedules fill host memory and time: what is in flight, what waits."""

from __future__ import annotations

# Layers whose copies are under way when a pass turns from forward to backward.
_AT_THE_TURN = 2


def micro_batches_in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches between forward and backward at most, under 1F1B (stages count from 0).

    Source: the warm-up of megatron/core/pipeline_parallel/schedules.py,
    `forward_backward_pipelining_without_interleaving`.
    """
    return min(stages - stage, micro_batches)


def chunk_passes_in_flight(stage: int, stages: int, virtual: int, micro_batches: int) -> int:
    """Model chunks' forwards whose backward is still to come, under the interleaved schedule.

    Source: `get_pp_rank_microbatches` of the same file: warm-up of 2 a later stage, and one round
    of all stages a later chunk; then one forward more before the first backward.
    """
    total = virtual * micro_batches
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, total)


def held_layers(
    swapping: int, stage: int, stages: int, micro_batches: int, virtual: int | None = None
) -> int:
    """Layers' worth of swapped bytes that a stage holds at once.

    Args:
        swapping: layers of the stage, all its model chunks, that swap.
        virtual: model chunks of a stage; None without interleaving.
    """
    if virtual is None or virtual == 1:
        return swapping * micro_batches_in_flight(stage, stages, micro_batches)
    passes = chunk_passes_in_flight(stage, stages, virtual, micro_batches)
    # Chunks have equally many layers; where the last ones are resident this is an upper bound.
    return -(-swapping * passes // virtual)


def passes(stages: int, micro_batches: int, virtual: int | None = None) -> float:
    """Micro-batches one after another in a step, and the bubble counted in micro-batches."""
    return micro_batches + (stages - 1) / (virtual or 1)


def both_share(swapping: int, in_flight: int) -> float:
    """Part of a pass's copies that meets copies of the other direction.

    With one micro-batch at a time forward's copies are over when backward's begin. With several,
    the last layers' copies out meet the first ones' way back of another micro-batch.
    """
    if in_flight <= 1 or swapping == 0:
        return 0.0
    return min(_AT_THE_TURN / swapping, 1.0)
