"""Device memory by part, at the moment when a trace's iteration needs most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_memo.phases import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    HEAD,
    LAYER,
    OPTIMIZER,
    UPDATE,
    Phase,
)
from megatron_memo.profile.trace import Enter, Free, Malloc, Trace, rounded

# How the profile names the buffers that activations come back in (swap.meta).
SWAP_BUFFER = "fused:swap_buffer"


@dataclass(frozen=True)
class Parts:
    """Bytes on one device at once.

    Attributes:
        weights: parameters, as the layers read them.
        gradients: the buffers that they are added up in.
        optimizer: master weights and moments; during a step also what it works with.
        skeletals: what forward keeps for backward, layer inputs among it.
        transients: what comes and goes within a layer or between two, kernels' workspaces too.
        head: logits and what the loss makes of them.
        buffers: where swapped activations come back, gather buffers, tables, the batch.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    skeletals: int = 0
    transients: int = 0
    head: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, int]:
        """In the order of the attributes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Peak:
    """The most memory that one rank needs, and when.

    Attributes:
        parts: of which it consists.
        where: what the rank was doing, in words.
        host_bytes: host memory for what is swapped, over the whole iteration.
        stage: the pipeline stage that it is of.
        held: bytes of it that are there between iterations too.
    """

    parts: Parts
    where: str
    host_bytes: int = 0
    stage: int = 0
    held: int = 0


def peak_of(trace: Trace) -> Peak:
    """What is alive at a trace's peak.

    Sizes are rounded as the allocator does. What an allocator reserves beyond the bytes that are
    alive is not in it (see `megatron-memo plan`), nor are the CUDA context and NCCL's buffers,
    which no trace of tensors has.
    """
    alive, phase = _at_peak(trace)
    moment = trace.phases[phase]
    ends = _end_phases(trace)
    found = dict.fromkeys((field.name for field in fields(Parts)), 0)
    held = sum(rounded(block.size, trace.header.rounding) for block in trace.held)
    all_held = held
    for name, size in trace.header.held_parts.items():
        if name in found:
            found[name] += size
            held -= size
    found["buffers"] += held
    for block, born in alive.items():
        end = ends.get(block.id)
        part = _part_of(
            block.what, trace.phases[born], moment, None if end is None else trace.phases[end]
        )
        found[part] += rounded(block.size, trace.header.rounding)
    stage = trace.header.fingerprint.get("pipeline stage", 0)
    return Peak(Parts(**found), str(moment), trace.header.host_bytes, stage, all_held)


def _part_of(what: str, born: Phase, moment: Phase, end: Phase | None) -> str:
    """The part of a block that is alive at `moment` and given back in phase `end`, if ever."""
    if what == SWAP_BUFFER:
        return "buffers"
    if born.part in (OPTIMIZER, UPDATE):
        return "optimizer"
    if born.part == HEAD and moment.part == HEAD:
        return "head"
    if born.part in (EMBEDDING, LAYER, HEAD):
        kept = born.direction == FORWARD and end is not None and end.direction == BACKWARD
        return "skeletals" if kept else "transients"
    return "buffers"


def _at_peak(trace: Trace) -> tuple[Mapping[Malloc, int], int]:
    """Blocks alive at the first moment of most bytes, each with its phase, and that of the moment.

    The moment is found first: following the blocks themselves takes longer than their sizes.
    """
    rounding = trace.header.rounding
    sizes: dict[int, int] = {}
    total = most = 0
    last = 0
    for time, event in enumerate(trace.events):
        if isinstance(event, Malloc):
            sizes[event.id] = rounded(event.size, rounding)
            total += sizes[event.id]
            if total > most:
                most, last = total, time
        elif isinstance(event, Free):
            total -= sizes.pop(event.id, 0)
    alive: dict[int, tuple[Malloc, int]] = {}
    phase = 0
    for event in trace.events[: last + 1]:
        if isinstance(event, Enter):
            phase = event.phase
        elif isinstance(event, Malloc):
            alive[event.id] = event, phase
        else:
            alive.pop(event.id, None)
    return dict(alive.values()), phase


def _end_phases(trace: Trace) -> dict[int, int]:
    """In which phase each block is given back."""
    found: dict[int, int] = {}
    phase = 0
    for event in trace.events:
        if isinstance(event, Enter):
            phase = event.phase
        elif isinstance(event, Free):
            found[event.id] = phase
    return found
