"""The order in which a pipeline stage works: passes of micro-batches, and the phases in each.

The same sequence as a profile's trace shows (tests/estimate/test_schedule.py compares the two), so
a timeline can be made of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_memo.estimate.job import Job
from megatron_memo.phases import (
    BACKWARD,
    COLLECTIVE,
    EMBEDDING,
    FORWARD,
    HEAD,
    LAYER,
    OPTIMIZER,
    OTHER,
    UPDATE,
    Phase,
)
from megatron_memo.profile.trace import Enter, Trace


@dataclass(frozen=True)
class Pass:
    """One micro-batch's way through one model chunk, forward or backward.

    Attributes:
        direction: "forward" or "backward"; "" for what belongs to no micro-batch.
        micro_batch: from 0.
        virtual: model chunk of the stage, from 0.
        phases: in order.
    """

    direction: str
    micro_batch: int
    virtual: int
    phases: tuple[Phase, ...]


def passes(job: Job, stage: int, chunks: int | None) -> list[Pass]:
    """What a stage does in an iteration.

    Args:
        job: layers and layout.
        stage: from 0.
        chunks: token chunks of a layer; None for layers that work in one piece.
    """
    order = [
        Pass(
            direction,
            micro_batch,
            virtual,
            tuple(_phases(job, stage, direction, micro_batch, virtual, chunks)),
        )
        for direction, micro_batch, virtual in _order(job, stage)
    ]
    order.append(Pass("", 0, 0, (Phase(OPTIMIZER), Phase(UPDATE))))
    return order


def passes_of_trace(trace: Trace) -> list[Pass]:
    """What the rank of a trace did, without the requests for memory."""
    entered = [trace.phases[event.phase] for event in trace.events if isinstance(event, Enter)]
    own = [phase for phase in entered if phase.part not in (OTHER, COLLECTIVE)]
    phases = [phase for phase, _ in itertools.groupby(own)]
    return [
        Pass(direction, micro_batch or 0, virtual or 0, tuple(group))
        for (direction, micro_batch, virtual), group in itertools.groupby(
            phases, key=lambda p: (p.direction, p.micro_batch, p.stage)
        )
    ]


def chunks_of(sequence: Iterable[Pass]) -> int | None:
    """Token chunks that layers work in; None if in one piece."""
    numbers = [p.chunk for one in sequence for p in one.phases if p.chunk is not None]
    return max(numbers) + 1 if numbers else None


def _phases(
    job: Job, stage: int, direction: str, micro_batch: int, virtual: int, chunks: int | None
) -> Iterator[Phase]:
    number = virtual if job.virtual > 1 else None

    def phase(part: str, layer: int | None = None, chunk: int | None = None) -> Phase:
        return Phase(part, direction, micro_batch, layer, chunk, number)

    first = stage == 0 and virtual == 0
    last = stage == job.pp - 1 and virtual == job.virtual - 1
    layers, pieces = job.layers_of(stage, virtual), range(chunks or 0)
    if direction == FORWARD:
        if first:
            yield phase(EMBEDDING)
        for layer in layers:
            for _ in range(2 if chunks else 1):  # before attention, and from it on
                yield phase(LAYER, layer)
                yield from (phase(LAYER, layer, k) for k in pieces)
            if chunks and job.has_experts(layer):
                yield phase(LAYER, layer)
        if last:
            yield phase(HEAD)
    else:
        if last:
            yield phase(HEAD)
        for layer in reversed(layers):
            for _ in range(2 if chunks else 1):
                yield phase(LAYER, layer)
                yield from (phase(LAYER, layer, k) for k in reversed(pieces))
        if first:
            yield phase(EMBEDDING)


def _order(job: Job, stage: int) -> list[tuple[str, int, int]]:
    """Direction, micro-batch and model chunk of each pass: Megatron's 1F1B, also interleaved.

    Source: ``get_pp_rank_microbatches`` and ``get_schedule_table`` of
    megatron/core/pipeline_parallel/schedules.py, and the loops that use them.
    """
    forwards = _table(job)
    backwards = [(m, job.virtual - 1 - v) for m, v in forwards]
    count = len(forwards)
    if job.pp == 1:
        warm_up = 0
    elif job.virtual == 1:
        warm_up = job.pp - stage - 1
    else:
        group = job.virtual_group or job.pp
        warm_up = (job.pp - stage - 1) * 2 + (job.virtual - 1) * group
    warm_up = min(warm_up, count)
    order = [(FORWARD, *one) for one in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [(FORWARD, *forward), (BACKWARD, *backward)]
    order += [(BACKWARD, *one) for one in backwards[count - warm_up :]]
    return order


def _table(job: Job) -> list[tuple[int, int]]:
    """Micro-batch and model chunk of each forward: a group runs through all chunks in turn."""
    group = job.virtual_group or job.pp
    if job.virtual == 1:
        return [(m, 0) for m in range(job.micro_batches)]
    starts = range(0, job.micro_batches, group)
    return [
        (m, v)
        for start in starts
        for v in range(job.virtual)
        for m in range(start, min(start + group, job.micro_batches))
    ]
