"""What is known of one rank when its swap ratio is to be chosen: seconds and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass


class NoRoom(ValueError):
    """Not even a ratio of 0 fits; the message names the limit, the least that fits, a remedy."""


@dataclass(frozen=True)
class Times:
    """Seconds of one layer's pass in one direction, for one micro-batch.

    Attributes:
        pre: norm, QKV projection, RoPE, of all tokens.
        attention: core attention.
        post: output projection, MLP, of all tokens.
    """

    pre: float
    attention: float
    post: float

    @property
    def total(self) -> float:
        return self.pre + self.attention + self.post


@dataclass(frozen=True)
class Link:
    """Bytes per second that one rank gets to and from host memory while all local ranks copy.

    Attributes:
        d2h, h2d: while nothing goes the other way.
        d2h_both, h2d_both: while both directions copy; None where that is no slower.
    """

    d2h: float
    h2d: float
    d2h_both: float | None = None
    h2d_both: float | None = None

    def seconds_out(self, both_share: float) -> float:
        """Seconds a byte takes to the host, if `both_share` of the bytes meet others."""
        return _mixed(self.d2h, self.d2h_both, both_share)

    def seconds_in(self, both_share: float) -> float:
        """Seconds a byte takes from the host, likewise."""
        return _mixed(self.h2d, self.h2d_both, both_share)


def _mixed(alone: float, both: float | None, share: float) -> float:
    return (1 - share) / alone + share / (alone if both is None else both)


@dataclass(frozen=True)
class Disk:
    """This rank's share of a disk that takes what host memory cannot hold.

    Attributes:
        nbytes: space.
        write, read: bytes per second with all local ranks at it.
    """

    nbytes: int
    write: float
    read: float


@dataclass(frozen=True)
class Depth:
    """How much may be on its way at once, in device buffers.

    Attributes:
        groups: what leaves together: half a layer of one token chunk, or attention's output. None
            is the paper's policy, two whole layers.
    """

    groups: int | None = None

    def __str__(self) -> str:
        return "layers" if self.groups is None else str(self.groups)

    def layers(self, groups_of_a_layer: int) -> float:
        """Layers' worth of bytes in the buffers; never more than the paper's two."""
        return 2.0 if self.groups is None else min(self.groups / groups_of_a_layer, 2.0)


LAYERS = Depth()


@dataclass(frozen=True)
class Problem:
    """One rank's layers and limits. Bytes and seconds of a layer are for one micro-batch.

    Attributes:
        rows: of this rank's layer input; the ratio is cut at a row.
        chunks: token chunks that a layer works in. A layer that both swaps and recomputes has two
            at least.
        forward, backward: of a layer that keeps everything.
        recompute: seconds to compute all rows again before backward.
        always: bytes that go to the host whatever the ratio: layer input, attention output.
        others: bytes that all rows add if they are swapped.
        link: to host memory.
        layers: of this rank's pipeline stage, resident ones among them.
        resident: of those, the layers that keep everything on the device.
        host: bytes of host memory this rank may use.
        held: layers' worth of swapped bytes that exist at once; None is every swapped layer once
            (see `schedule`).
        passes: micro-batches one after another in a step, the pipeline's bubble among them.
        both_share: part of the bytes that is copied while the other direction copies as well.
        other_seconds: of a step, outside of the layers.
        disk: None where there is none.
        device: bytes that buffers may take; None for no limit.
        depths: to choose from.
    """

    rows: int
    chunks: int
    forward: Times
    backward: Times
    recompute: float
    always: int
    others: int
    link: Link
    layers: int
    resident: int
    host: int
    held: int | None = None
    passes: float = 1.0
    both_share: float = 0.0
    other_seconds: float = 0.0
    disk: Disk | None = None
    device: int | None = None
    depths: tuple[Depth, ...] = (LAYERS,)

    def __post_init__(self) -> None:
        for name in ("rows", "chunks"):
            _check(name, getattr(self, name), at_least=1)
        for name in ("recompute", "always", "others", "layers", "resident", "host", "passes"):
            _check(name, getattr(self, name))
        for name, times in (("forward", self.forward), ("backward", self.backward)):
            for part in ("pre", "attention", "post"):
                _check(f"{name}.{part}", getattr(times, part))
        speeds: dict[str, float | None] = {"d2h": self.link.d2h, "h2d": self.link.h2d}
        speeds |= {"d2h_both": self.link.d2h_both, "h2d_both": self.link.h2d_both}
        if self.disk is not None:
            speeds |= {"disk.write": self.disk.write, "disk.read": self.disk.read}
            _check("disk.nbytes", self.disk.nbytes)
        for name, speed in speeds.items():
            if speed is not None and not speed > 0:
                raise ValueError(f"{name} is {speed}: a bandwidth must be above 0 bytes a second")
        if not 0 <= self.both_share <= 1:
            raise ValueError(f"both_share is {self.both_share}: must be from 0 to 1")
        if not self.depths:
            raise ValueError("depths is empty: there must be one to choose")

    @property
    def swapping(self) -> int:
        """Layers of the stage that swap and recompute."""
        return max(self.layers - self.resident, 0)

    @property
    def most_held(self) -> int:
        return self.swapping if self.held is None else self.held

    def groups(self, rows: int) -> int:
        """Groups of a layer if `rows` are swapped: pre and post of each chunk, and attention."""
        mixed = 0 < rows < self.rows
        return 2 * max(self.chunks, 2 if mixed else 1) + 1


def _check(name: str, value: float, at_least: float = 0) -> None:
    if not value >= at_least or math.isinf(value):  # also catches NaN
        raise ValueError(f"{name} is {value}: must be a finite number, at least {at_least}")
