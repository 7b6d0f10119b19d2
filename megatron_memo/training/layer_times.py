"""How long a layer's parts take, from the phase markers of a training step.

NOTE: what is measured. A part lasts from its marker to the next one. The seconds in which compute
stood still for a copy are taken out where the backend tells them (CPU); on CUDA a wait inside a
layer counts as compute, which at a ratio of 0, with little to copy, is rare. Recomputation is taken
out of backward and told apart. Each number is the median over layers and micro-batches, so that a
wait for another pipeline stage at the end of a pass does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_memo import phases
from megatron_memo.layer.recompute_watch import watching
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.plan.ratio import Times

Mark = Any  # what a clock gives for the present


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer and micro-batch; see `plan.ratio.Problem`.

    Attributes:
        forward, backward: without recomputation and waits.
        recompute: of everything that was computed again.
        passes: of a layer that were seen.
    """

    forward: Times
    backward: Times
    recompute: float
    passes: int


def differ_by(first: LayerTimes, second: LayerTimes) -> float:
    """How much longer a layer took in the slower of two steps, as a part of the faster one.

    Recomputation is left out: the steps may have recomputed different numbers of rows.
    """
    one, other = (each.forward.total + each.backward.total for each in (first, second))
    return max(one, other) / (min(one, other) or math.inf) - 1 if one != other else 0.0


class HostClock:
    """Compute runs in the calling thread: the time is now."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, first: Mark, second: Mark) -> float:
        return second - first

    def settle(self) -> None:
        """Nothing is outstanding."""


class CudaClock:
    """Events on the compute stream, read after the step. Nothing waits inside of it."""

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Mark, second: Mark) -> float:
        return first.elapsed_time(second) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class _Moment:
    """A marker: the phase that begins (None: recomputation begins or ends), when, waits so far."""

    phase: Phase | None
    mark: Mark
    waited: float


class LayerWatch:
    """Notes when phases change inside `listening`, and makes `LayerTimes` of them.

    Args:
        clock: `HostClock` or `CudaClock`.
        waited: seconds that compute has stood still for copies since the process began.
    """

    def __init__(self, clock: HostClock | CudaClock, waited: Callable[[], float]) -> None:
        self._clock = clock
        self._waited = waited
        self._moments: list[_Moment] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The body is a training step; what an earlier one left is forgotten."""
        self._moments = []
        with phases.listening(self._note), watching(lambda _: self._note(None)):
            yield
            self._note(phases.START)
        self._clock.settle()

    def _note(self, phase: Phase | None) -> None:
        self._moments.append(_Moment(phase, self._clock.mark(), self._waited()))

    def times(self) -> LayerTimes:
        """Of the step that was listened to.

        Raises:
            ValueError: no layer ran forward and backward in it.
        """
        parts = _parts(self._stretches())
        found: dict[str, list[list[float]]] = {FORWARD: [], BACKWARD: []}
        again = []
        for (direction, *_), seconds in parts.items():
            found[direction].append(seconds[:3])
            if direction == BACKWARD:
                again.append(seconds[3])
        if not found[FORWARD] or not found[BACKWARD]:
            raise ValueError("no layer of memo's ran forward and backward in the measured step")
        forward, backward = (
            Times(*(statistics.median(column) for column in zip(*rows, strict=True)))
            for rows in (found[FORWARD], found[BACKWARD])
        )
        return LayerTimes(forward, backward, statistics.median(again), len(found[FORWARD]))

    def _stretches(self) -> Iterator[tuple[Phase, float, bool]]:
        """(phase, seconds, whether it was recomputation) between one moment and the next."""
        phase, again = phases.START, False
        for first, second in zip(self._moments, self._moments[1:], strict=False):
            if first.phase is None:
                again = not again
            else:
                phase = first.phase
            seconds = self._clock.seconds(first.mark, second.mark)
            yield phase, max(seconds - (second.waited - first.waited), 0.0), again


def _parts(stretches: Iterator[tuple[Phase, float, bool]]) -> dict[tuple, list[float]]:
    """(direction, micro-batch, layer, stage) -> seconds of pre, attention, post, recomputation.

    In forward the chunks before the whole layer's second marker are `pre`, in backward `post`: the
    first and second such markers are the layer's beginning and attention. A third one, of a mixture
    of experts, begins more of forward's `post`; in backward it is the first, and `post` too.
    """
    found: dict[tuple, list[float]] = defaultdict(lambda: [0.0] * 4)
    wholes: dict[tuple, int] = defaultdict(int)
    last: Phase | None = None
    for phase, seconds, again in stretches:
        if phase.part != LAYER:
            last = phase
            continue
        key = (phase.direction, phase.micro_batch, phase.layer, phase.stage)
        if phase.chunk is None and phase != last:
            wholes[key] += 1
        last = phase
        attends = phase.chunk is None and wholes[key] == 2
        part = 1 if attends else 0 if wholes[key] < 2 else 2
        if phase.direction == BACKWARD:
            part = 2 - part
        found[key][3 if again else part] += seconds
    return dict(found)
