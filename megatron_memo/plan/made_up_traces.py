"""Made-up traces of training iterations, for tests and benchmarks of the planner: reproducible.

They have the shape of real ones, not their numbers: every layer works through its tokens in chunks
with a fixed pattern of short-lived blocks, holds a few blocks of the whole sequence meanwhile, and
leaves skeletal blocks until its backward, or until they were swapped out two layers later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from megatron_memo.phases import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    HEAD,
    LAYER,
    OPTIMIZER,
    START,
    Phase,
)
from megatron_memo.profile.trace import Enter, Event, Free, Header, Malloc, Trace

SIDE_STREAM = 7
# Sizes of blocks in units of one tensor of hidden states, of the chunk or of the sequence.
SCALES = (0.25, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0)


@dataclass(frozen=True)
class Shape:
    """What is trained, and how.

    Attributes:
        keep: what becomes of skeletal blocks: "all" stay until backward, "swap" go two layers later
            and come back one layer before their backward, "input" keeps the layer's input alone and
            backward runs the forward again.
        micro_batches: of one iteration; `in_flight` of them run forward before the first backward
            (1F1B: then one backward and one forward by turns).
        jitter: sizes of a layer's short-lived blocks differ by up to this share from layer to
            layer, as those of experts do.
        unit: bytes of the hidden states of the whole sequence.
        forward, backward: short-lived blocks of a chunk in each half of a layer.
    """

    layers: int = 4
    chunks: int = 1
    keep: Literal["all", "swap", "input"] = "swap"
    micro_batches: int = 1
    in_flight: int = 1
    jitter: float = 0.0
    unit: int = 1 << 28
    forward: int = 12
    backward: int = 18
    seed: int = 0


def training(shape: Shape) -> Trace:
    """One iteration: embedding, layers, loss head, layers backward, optimizer."""
    return _Maker(shape).trace()


# (scale, further blocks born before this one dies) of the short-lived blocks of half a chunk
_Pattern = list[tuple[float, int]]


class _Maker:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._random = random.Random(shape.seed)
        self._jitter = random.Random(shape.seed + 1)
        self._events: list[Event] = []
        self._phases: dict[Phase, int] = {START: 0}
        self._next_id = 0
        self._forward = [self._pattern(shape.forward) for _ in range(2)]
        self._backward = [self._pattern(shape.backward) for _ in range(2)]
        self._whole = [1.0, 0.5, 0.5, 1.0]  # q, k, v and the attention output
        self._skeletal = [self._random.choice(SCALES) for _ in range(4)]
        # What a micro-batch carries from forward to backward: by layer, blocks to free.
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._leaving: list[list[int]] = []

    def trace(self) -> Trace:
        shape = self.shape
        weights = Malloc(self._new_id(), 3 * shape.unit, 0, "weights")
        ahead = min(shape.in_flight, shape.micro_batches)
        for number in range(ahead):
            self._forward_pass(number)
        for number in range(shape.micro_batches):
            self._backward_pass(number)
            if ahead + number < shape.micro_batches:
                self._forward_pass(ahead + number)
        self._enter(Phase(OPTIMIZER))
        norm = self._malloc(4 / shape.unit, "norm")
        self._malloc(0.001, "kept state")  # never freed
        self._free(norm)
        header = Header("profile", fingerprint={"made up": str(shape)}, same_ranks=(0,))
        return Trace(header, tuple(self._phases), tuple(self._events), (weights,))

    def _pattern(self, count: int) -> _Pattern:
        choice = self._random.choice
        return [(choice(SCALES), choice((1, 1, 1, 2, 3, 5))) for _ in range(count)]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _enter(self, phase: Phase) -> None:
        self._events.append(Enter(self._phases.setdefault(phase, len(self._phases))))

    def _malloc(self, scale: float, what: str, stream: int = 0) -> int:
        identity = self._new_id()
        size = max(1, round(scale * self.shape.unit))
        self._events.append(Malloc(identity, size, stream, what))
        return identity

    def _free(self, *identities: int) -> None:
        self._events.extend(Free(identity) for identity in identities)

    def _run(self, pattern: _Pattern) -> None:
        """The short-lived blocks of half a chunk."""
        jitter, share = self.shape.jitter, 1 / self.shape.chunks
        ends: dict[int, list[int]] = {}
        for step, (scale, span) in enumerate(pattern):
            size = scale * share * (1 + self._jitter.uniform(-jitter, jitter))
            ends.setdefault(step + span, []).append(self._malloc(size, "short-lived"))
            self._free(*ends.pop(step, []))
        for step in sorted(ends):
            self._free(*ends[step])

    def _forward_pass(self, number: int) -> None:
        shape = self.shape
        self._enter(Phase(EMBEDDING, FORWARD, number))
        tokens = self._malloc(0.01, "embedding", SIDE_STREAM)
        hidden = self._malloc(1, "hidden states")
        self._free(tokens)
        self._leaving = []
        for layer in range(1, shape.layers + 1):
            hidden = self._layer_forward(number, layer, hidden)
        for old in self._leaving:
            self._free(*old)
        self._enter(Phase(HEAD, FORWARD, number))
        logits = [self._malloc(2 / shape.chunks, "logits") for _ in range(2)]
        self._free(*logits)
        self._kept[number, 0] = [hidden]

    def _layer_forward(self, number: int, layer: int, hidden: int) -> int:
        shape = self.shape
        self._enter(Phase(LAYER, FORWARD, number, layer))
        whole = [self._malloc(scale, "whole sequence") for scale in self._whole]
        skeletal = []
        for half, pattern in enumerate(self._forward):
            if half:
                output = self._malloc(1, "hidden states")
            for chunk in range(shape.chunks):
                self._enter(Phase(LAYER, FORWARD, number, layer, chunk))
                self._run(pattern)
                if shape.keep != "input":
                    scale = self._skeletal[half] / shape.chunks
                    skeletal.append(self._malloc(scale, "skeletal"))
        self._enter(Phase(LAYER, FORWARD, number, layer))
        if shape.keep == "all":
            self._kept[number, layer] = [hidden, *whole, *skeletal]
        elif shape.keep == "input":
            self._free(*whole)
            self._kept[number, layer] = [hidden]
        else:
            self._free(hidden, *whole)
            self._leaving.append(skeletal)
            if len(self._leaving) > 2:
                self._free(*self._leaving.pop(0))
        return output

    def _backward_pass(self, number: int) -> None:
        shape = self.shape
        self._enter(Phase(HEAD, BACKWARD, number))
        logits = self._malloc(2 / shape.chunks, "logits")
        gradient = self._malloc(1, "gradient")
        self._free(logits, *self._kept.pop((number, 0)))
        arriving: list[int] = []
        for layer in range(shape.layers, 0, -1):
            gradient, arriving = self._layer_backward(number, layer, gradient, arriving)
        self._free(*arriving)
        self._enter(Phase(EMBEDDING, BACKWARD, number))
        weight = self._malloc(1.5, "weight gradient")
        self._free(weight, gradient)

    def _layer_backward(
        self, number: int, layer: int, gradient: int, here: list[int]
    ) -> tuple[int, list[int]]:
        """The gradient of the layer's input, and what was fetched for the layer below."""
        shape = self.shape
        self._enter(Phase(LAYER, BACKWARD, number, layer))
        arriving: list[int] = []
        if shape.keep == "swap":
            arriving = [
                self._malloc(self._skeletal[half] / shape.chunks, "fetched")
                for half in range(2)
                for _ in range(shape.chunks)
            ]
        whole = [self._malloc(scale, "gradient") for scale in self._whole]
        for half in (1, 0):
            if not half:
                below = self._malloc(1, "gradient")
            for chunk in reversed(range(shape.chunks)):
                self._enter(Phase(LAYER, BACKWARD, number, layer, chunk))
                if shape.keep == "input":
                    self._run(self._forward[half])
                self._run(self._backward[half])
        self._enter(Phase(LAYER, BACKWARD, number, layer))
        self._free(gradient, *whole, *here, *self._kept.pop((number, layer), []))
        return below, arriving
