"""The swap engine's protocol on simulated streams: what leaves, what comes back, who waits.

NOTE: it follows megatron_memo/swap/engine.py step by step
----------------------------------------------------------
* What a step saved leaves for the host as the step ends, and its device memory is given up when
  `depth` more steps have ended, or two layers later: compute waits for the copy then.
* In backward, groups come back in the order in which they are read, as many steps ahead; a copy
  begins no earlier than the point of compute at which its buffer is taken. Compute waits for a
  group before it first reads it.
* What is still in flight at the turn to backward is read where it is, and never comes back. In a
  pipeline, what another micro-batch has in flight is given up piece by piece meanwhile.
* Host memory of a group is taken when it leaves and given back at the end of its layer's backward.
  Groups that it cannot hold go on to disk, through two staging buffers, and are read back from
  there as they are fetched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from megatron_memo.estimate.clock import D2H, DISK_READ, DISK_WRITE, H2D, Clock
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.strategies import Group, LayerPlan, Strategy
from megatron_memo.phases import Phase

_LAYERS_IN_FLIGHT = 2
_STAGING = 2  # groups on their way to disk that have left the device


class Place(Enum):
    """Where a group can be read."""

    SOURCE = auto()
    HOST = auto()
    BUFFER = auto()


@dataclass
class Moved:
    """A group of one layer and micro-batch.

    Attributes:
        group: what it is.
        d2h, written, h2d: when these copies are done.
        on_disk: it went on from the host.
        read: compute has waited for it.
    """

    group: Group
    place: Place = Place.SOURCE
    d2h: float = 0.0
    written: float = 0.0
    h2d: float = 0.0
    on_disk: bool = False
    read: bool = False


@dataclass
class LayerPass:
    """One layer's forward and backward of one micro-batch."""

    plan: LayerPlan
    name: str
    below: LayerPass | None
    moved: list[Moved] = field(default_factory=list)


@dataclass
class Portion:
    """What is given up at once: a step of a pass, or all of it (step None)."""

    owner: LayerPass
    step: int | None

    @property
    def groups(self) -> list[Moved]:
        return [m for m in self.owner.moved if self.step in (None, max(m.group.step, 0))]


class Mover:
    """Copies of one rank.

    Args:
        clock: its streams.
        costs: bandwidths; the machine's host and disk budgets.
        strategy: depth, and whether compute is held back.
        limited: go to disk, or refuse, when host memory is full; else only count.
    """

    def __init__(self, clock: Clock, costs: Costs, strategy: Strategy, *, limited: bool):
        self.clock, self.costs, self.strategy = clock, costs, strategy
        self._in_flight: deque[Portion] = deque()
        self._passes: dict[tuple[int, int, int], LayerPass] = {}
        self._tail: LayerPass | None = None
        self._limited = limited
        self._staged: deque[Moved] = deque(maxlen=_STAGING)
        self.host = self.host_peak = self.disk = self.disk_peak = 0
        self.moved_out = self.moved_in = 0

    # ---- forward

    def begin_layer(
        self, key: tuple[int, int, int], plan: LayerPlan, phase: Phase, *, first: bool
    ) -> None:
        """A layer's forward starts.

        Args:
            key: model chunk, micro-batch, layer.
            plan: of the layer.
            phase: that begins.
            first: it is the model chunk's first.
        """
        one = LayerPass(plan, f"layer {key[2]}", None if first else self._tail)
        self._passes[key] = self._tail = one
        if self.strategy.depth is None:
            self._keep_in_flight(_LAYERS_IN_FLIGHT - 1)
            self._in_flight.append(Portion(one, None))
        self._send_all(one, -1, phase)

    def end_step(self, key: tuple[int, int, int], step: int, phase: Phase) -> None:
        """A step of the forward is over: what it saved leaves."""
        one = self._passes[key]
        self._send_all(one, step, phase)
        if self.strategy.depth is not None:
            self._in_flight.append(Portion(one, step))
            self._keep_in_flight(self.strategy.depth)

    def _send_all(self, one: LayerPass, step: int, phase: Phase) -> None:
        for group in one.plan.groups:
            if group.step == step:
                one.moved.append(self._send(Moved(group), one, phase))

    def _send(self, moved: Moved, one: LayerPass, phase: Phase) -> Moved:
        nbytes, ready = moved.group.nbytes, self.clock.now
        name = f"{one.name}: {moved.group.name}"
        moved.on_disk = self._take(nbytes)
        if moved.on_disk and len(self._staged) == _STAGING:
            ready = max(ready, self._staged[0].written)
        moved.d2h = self.clock.run(D2H, nbytes / self.costs.d2h, name, phase, ready, nbytes)
        self.moved_out += nbytes
        if moved.on_disk:
            rate = self.costs.machine.disk_write / self.costs.machine.gpus
            moved.written = self.clock.run(
                DISK_WRITE, nbytes / rate, name, phase, moved.d2h, nbytes
            )
            self._staged.append(moved)
        return moved

    def _take(self, nbytes: int) -> bool:
        """Takes host memory, or disk space where that is full; whether it is on disk."""
        machine = self.costs.machine
        full = self.host + nbytes > machine.host_memory_of_gpu
        room_on_disk = machine.disk // machine.gpus
        if self._limited and full and self.disk + nbytes <= room_on_disk:
            self.disk += nbytes
            self.disk_peak = max(self.disk_peak, self.disk)
            return True
        self.host += nbytes
        self.host_peak = max(self.host_peak, self.host)
        return False

    # ---- giving up

    def _keep_in_flight(self, portions: int) -> None:
        while len(self._in_flight) > portions:
            self._retire(self._in_flight.popleft())

    def _retire(self, portion: Portion) -> None:
        for moved in portion.groups:
            if moved.place is Place.SOURCE:
                self._let_go(moved)

    def _let_go(self, moved: Moved) -> None:
        """Device memory of a group is given up: its copies must be done."""
        if moved.place is Place.SOURCE:
            moved.place = Place.HOST
            if self.strategy.holds_back:
                self.clock.wait(D2H, moved.d2h)
        elif moved.place is Place.BUFFER and not moved.read:
            moved.read = True
            self.clock.wait(H2D, moved.h2d)

    def _take_turn(self, one: LayerPass, step: int | None) -> None:
        if any(portion.owner is one for portion in self._in_flight):
            if step is not None:
                self._leave(one, step)
        elif self._in_flight:
            self._retire(self._in_flight.popleft())

    def _leave(self, one: LayerPass, step: int = 0) -> None:
        self._in_flight = deque(
            p for p in self._in_flight if p.owner is not one or (p.step or 0) < step
        )

    # ---- backward

    def begin_backward(self, key: tuple[int, int, int], phase: Phase) -> None:
        """The gradient of a layer's output has come."""
        one = self._passes[key]
        if self.strategy.depth is not None:
            self._fetch_from(one, one.plan.steps - 1, self.strategy.depth, phase)
            return
        self._take_turn(one, None)
        below = one.below
        while below is not None and not below.plan.groups:
            below = below.below
        for each in (one, below):
            if each is not None:
                self._fetch(each, each.moved, phase)

    def begin_backward_step(self, key: tuple[int, int, int], step: int, phase: Phase) -> None:
        """Backward begins a step, and reads what it reads."""
        one = self._passes[key]
        for moved in one.moved:
            if moved.group.last > step:
                self._let_go(moved)
        if self.strategy.depth is not None:
            self._take_turn(one, step)
            self._fetch_from(one, step, self.strategy.depth, phase)
        for moved in one.moved:
            if moved.group.last <= step <= moved.group.first:
                self._read(moved, one, phase)

    def read_all(self, key: tuple[int, int, int], phase: Phase) -> None:
        """Backward reads everything that the layer has at once."""
        one = self._passes[key]
        for moved in one.moved:
            self._read(moved, one, phase)

    def end_backward(self, key: tuple[int, int, int]) -> None:
        """The gradient of the layer's input is complete."""
        one = self._passes.pop(key)
        self._leave(one)
        for moved in one.moved:
            self._let_go(moved)
            if moved.on_disk:
                self.disk -= moved.group.nbytes
            else:
                self.host -= moved.group.nbytes
        one.moved.clear()
        one.below = None

    def _read(self, moved: Moved, one: LayerPass, phase: Phase) -> None:
        if moved.place is Place.HOST:
            self._fetch(one, [moved], phase)
        if moved.place is Place.BUFFER and not moved.read:
            moved.read = True
            self.clock.wait(H2D, moved.h2d)

    def _fetch_from(self, one: LayerPass, step: int, depth: int, phase: Phase) -> None:
        """Brings back what is read first in `step` and in the `depth` steps that follow it."""
        each: LayerPass | None = one
        left = depth + 1
        while each is not None and left > 0:
            wanted = [m for m in each.moved if step - left < m.group.first <= step]
            self._fetch(each, wanted, phase)
            left -= step + 1
            each = each.below
            step = each.plan.steps - 1 if each is not None else -1

    def _fetch(self, one: LayerPass, wanted: list[Moved], phase: Phase) -> None:
        for moved in sorted(wanted, key=lambda m: -m.group.first):
            if moved.place is not Place.HOST:
                continue
            moved.place = Place.BUFFER
            nbytes, ready = moved.group.nbytes, max(self.clock.now, moved.d2h)
            name = f"{one.name}: {moved.group.name}"
            if moved.on_disk:
                rate = self.costs.machine.disk_read / self.costs.machine.gpus
                ready = self.clock.run(
                    DISK_READ, nbytes / rate, name, phase, max(ready, moved.written), nbytes
                )
            moved.h2d = self.clock.run(H2D, nbytes / self.costs.h2d, name, phase, ready, nbytes)
            self.moved_in += nbytes
