"""The structure of an iteration that solvers use: passes through layers, most of them alike.

A pass is one layer's (or the embedding's, the head's, ...) forward or backward of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .problem import Buffer
from .requests import Requests


@dataclass(frozen=True)
class Pass:
    """Buffers (indices into the problem) that are born in one pass, in order.

    Attributes:
        family: passes of the same part and direction with equally many buffers.
        kind: passes of the same kind ask for the same sizes in the same order.
        number: the layer's, 0 outside of layers.
        inner: those of the buffers that also die before the next pass begins.
        shape: lifetimes and sizes of `inner`, from the first one's beginning: passes of equal shape
            have the same answers.
    """

    family: int
    kind: int
    number: int
    buffers: tuple[int, ...]
    inner: tuple[int, ...]
    shape: tuple[tuple[int, int, int], ...]


def passes_of(requests: Requests, buffers: Sequence[Buffer]) -> list[Pass]:
    """The passes in the order of time; every buffer is in exactly one.

    Args:
        buffers: of `requests.problem()`.
    """
    runs: list[tuple[tuple[object, ...], list[int]]] = []
    for k, index in enumerate(requests.planned):
        phase = requests.phases[requests.requests[index].phase]
        key: tuple[object, ...] = (
            phase.part,
            phase.direction,
            phase.micro_batch,
            phase.layer,
            phase.stage,
        )
        if not runs or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append(k)
    never = max(b.upper for b in buffers)
    ends = [buffers[after[1][0]].lower for _, after in pairwise(runs)] + [never]
    families: dict[tuple[object, ...], int] = {}
    kinds: dict[tuple[object, ...], int] = {}
    passes = []
    for (key, members), end in zip(runs, ends, strict=True):
        part, direction, _, layer, _ = key
        content = (part, direction, tuple(buffers[k].size for k in members))
        inner = tuple(k for k in members if buffers[k].upper <= end)
        began = buffers[inner[0]].lower if inner else 0
        shape = tuple(
            (buffers[k].lower - began, buffers[k].upper - began, buffers[k].size) for k in inner
        )
        number = layer if isinstance(layer, int) else 0
        family = families.setdefault((part, direction, len(members)), len(families))
        kind = kinds.setdefault(content, len(kinds))
        passes.append(Pass(family, kind, number, tuple(members), inner, shape))
    return passes
