"""The swap engine of a process: which layer's tensors are where, and who waits for whom.

NOTE: the protocol
------------------
Three streams: compute (whatever stream is current), D2H, H2D. A layer works in steps (see
`layer_pass`). In forward a step makes tensors, `put` notes them, `flush` copies them out as a
*group*. Some steps later their device memory is given up: how many is the pass's depth, and that,
not a queue, is what bounds device memory. In backward groups come back in the order in which
backward reads them, as many steps ahead, each into device memory of its own, which is let go when
the last step that reads it is over. A group's host block keeps it until the layer's backward ends,
so one that is asked for once more is fetched once more.

State belongs to a `LayerContext`, one for each (layer, micro-batch), reached through the autograd
graph of that very forward. Nothing is inferred from a queue being empty.

There are five waits. Each is a method of its own below; tests/layer/test_protocol.py and, for the
fifth, tests/swap/test_context.py show that the numbers go wrong without it.

1. d2h_after_compute   D2H waits for compute: the tensor must have been written.
2. retire_after_d2h    compute waits for a group's D2H before the tensors' memory is given up, since
                       compute (the only stream that allocates) may then write other data into it.
3. buffer_is_free      H2D waits for compute at the point where the buffer was allocated: compute
                       may still be using that memory for what it held before. As compute has
                       waited for the group's D2H by then (2), H2D is ordered after it as well.
4. read_after_h2d      compute waits for a group's H2D before it first reads from the group.
5. free_after_h2d      compute waits for the H2D of a group that nobody read, before the buffer's
                       memory is given up.

Host blocks need no wait of their own: a block is given back after (4) or (5), and its next D2H
waits for compute (1); blocks of a context that is dropped without a backward are next written by
the same D2H stream, in order.

Who frees what: sources die when their group is retired, buffers when it is let go, both by the
engine's `let_go`, which fills them with NaN first under --memo-poison; host blocks go back at
`release`. At the turn from forward to backward the last groups have not been retired; their
backward reads the forward's own tensors.

Nothing is allocated on a side stream and `record_stream` is never needed.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_memo.config import HostSettings, MemoConfig
from megatron_memo.swap.backend import Backend, Copy, Event
from megatron_memo.swap.context import LayerContext
from megatron_memo.swap.layer_pass import Depth, LayerPass, Portion
from megatron_memo.swap.tiers import storage

IN_FLIGHT_LAYERS = 2  # the paper's two rounding buffers
POISON_BYTE = 0xFF  # NaN in every IEEE floating-point type


class SwapEngine:
    """Owns the streams, the host memory and the layers in flight of one process.

    Args:
        backend: the device's streams.
        sync: wait for every copy at once.
        poison: fill memory with NaN when it is given up.
        host: how much host memory there is, and what holds the rest.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        sync: bool = False,
        poison: bool = False,
        host: HostSettings = HostSettings(),  # noqa: B008 (frozen)
    ):
        self.backend, self.host = storage(backend, host)
        self._sync = sync
        self._poison = poison
        self._in_flight: deque[Portion] = deque()
        self._tail: weakref.ref[LayerPass] | None = None
        self._numbers = itertools.count()
        self._abandoned: deque[LayerContext] = deque()  # appended to by any thread
        self.device = torch.device("cpu")
        self.reset_interval()

    # ---- called by the layer

    def begin_layer(
        self, *, first: bool, swaps: bool, device: torch.device, depth: Depth = None
    ) -> LayerPass:
        """A layer's forward starts.

        Args:
            first: the layer is the model chunk's first; a new pass begins.
            swaps: whether the layer swaps at all.
            device: where the layer computes.
            depth: steps after which what the layer put is given up, and before which it comes
                back; None gives up the layer two before it now, and its own two layers later.
        """
        self.device = device
        while self._abandoned:
            self._abandoned.popleft().release()
        below = None if first or self._tail is None else self._tail()
        own = LayerContext(self) if swaps else None
        passing = LayerPass(self, next(self._numbers), own, below, depth)
        if depth is None:
            self._keep_in_flight(IN_FLIGHT_LAYERS - 1)
            self._in_flight.append(Portion(passing.number, None, own, None))
        self._tail = weakref.ref(passing)  # its graph holds it, for as long as it has a backward
        return passing

    # ---- called by the layer's pass

    def step_has_ended(self, portion: Portion, depth: int) -> None:
        """A step of a forward is over; the one `depth` before it is given up."""
        self._in_flight.append(portion)
        self._keep_in_flight(depth)

    def take_turn(self, owner: int, step: int | None = None) -> None:
        """A pass goes backward, from `step` on (None: from its end on).

        What it has in flight there it reads itself, and lets go. If all that is in flight is of
        others, their turn comes later: one portion is retired for each that goes backward, so that
        its D2H has the time of one, as in forward.
        """
        if any(portion.owner == owner for portion in self._in_flight):
            if step is not None:
                self.leave(owner, step)
        elif self._in_flight:
            self._in_flight.popleft().retire()

    def leave(self, owner: int, step: int = 0) -> None:
        """What a pass has in flight from `step` on is its backward's affair now."""
        self._in_flight = deque(
            portion
            for portion in self._in_flight
            if portion.owner != owner or (portion.step or 0) < step
        )

    def _keep_in_flight(self, portions: int) -> None:
        while len(self._in_flight) > portions:
            self._in_flight.popleft().retire()

    def abandon(self, context: LayerContext) -> None:
        """Takes a context that nobody refers to any more; it is released at the next layer."""
        self._abandoned.append(context)

    # ---- the five waits

    def start_d2h(self, copies: Sequence[Copy]) -> Event:
        event = self.backend.d2h(copies, after=self.d2h_after_compute())
        self._count("d2h_bytes", copies)
        if self._sync:
            event.synchronize()
        return event

    def d2h_after_compute(self) -> Event | None:
        return self.backend.record_compute()

    def retire_after_d2h(self, event: Event | None) -> None:
        assert event is not None
        self._stats["exposed_d2h_s"] += self.backend.compute_waits(event)

    def start_h2d(self, copies: Sequence[Copy], ready: Event | None) -> Event:
        event = self.backend.h2d(copies, after=ready)
        self._count("h2d_bytes", copies)
        if self._sync:
            event.synchronize()
        return event

    def buffer_is_free(self) -> Event | None:
        return self.backend.record_compute()

    def read_after_h2d(self, event: Event | None) -> None:
        assert event is not None
        self._stats["exposed_h2d_s"] += self.backend.compute_waits(event)

    def free_after_h2d(self, event: Event) -> None:
        self._stats["exposed_h2d_s"] += self.backend.compute_waits(event)

    # ---- memory that is given up

    def let_go(self, tensors: list[Tensor]) -> None:
        """Drops the last references; the list is emptied."""
        while tensors:
            tensor = tensors.pop()
            # Others that hold the storage keep its memory; then it is not given up.
            if not _shared(tensor, own=1):
                self.poison(tensor)

    def new_buffer(self, nbytes: int) -> Tensor:
        """Device memory for what comes back, flat uint8; the present compute stream's."""
        buffer = self.backend.device_buffer(nbytes, self.device)
        self.poison(buffer)
        return buffer

    def poison(self, tensor: Tensor) -> None:
        """Under --memo-poison: NaN into memory whose content nobody may rely on (flat uint8)."""
        if self._poison:
            tensor.fill_(POISON_BYTE)

    # ---- measurements

    def reset_interval(self) -> None:
        """Starts a new interval of `stats`."""
        self._stats: dict[str, float] = dict.fromkeys(
            ("d2h_bytes", "h2d_bytes", "exposed_d2h_s", "exposed_h2d_s"), 0
        )
        self._before = self._clocks()

    def stats(self) -> dict[str, float | None]:
        """Since `reset_interval`: bytes moved, seconds that compute stood still for it, seconds
        during which each direction was copying (None where the backend cannot tell), so that
        bytes over busy seconds is the bandwidth achieved; and bytes held now in host memory and
        on disk."""
        told: dict[str, float | None] = dict(self._stats)
        for name, now in self._clocks().items():
            before = self._before[name]
            known = now is not None and before is not None
            told[name] = self._stats.get(name, 0.0) + now - before if known else None
        held = {"host_bytes": self.host.total_bytes, "disk_bytes": self.host.disk_bytes}
        return {**told, **held}

    def _clocks(self) -> dict[str, Any]:
        """Seconds since the start that the backend has counted, by the names of `stats`."""
        counted: dict[str, Any] = {}
        for (d2h, h2d), seconds in (
            (("exposed_d2h_s", "exposed_h2d_s"), self.backend.waited_seconds()),
            (("d2h_busy_s", "h2d_busy_s"), self.backend.busy_seconds()),
        ):
            counted[d2h], counted[h2d] = seconds or (None, None)
        return counted

    def _count(self, name: str, copies: Sequence[Copy]) -> None:
        self._stats[name] += sum(copy.device.numel() for copy in copies)


def _shared(tensor: Tensor, own: int) -> bool:
    """Whether anyone but `own` tensors (and this call's storage handle) holds the storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > own + 1


_engine: SwapEngine | None = None
# Of an engine made here: sync, poison, host, link.
_made_for: tuple[bool, bool, HostSettings, int | None] | None = None


def get_engine(config: MemoConfig | None = None) -> SwapEngine:
    """The process's engine, made at the first call for the device that is there.

    Args:
        config: sync, poison, host and link; an engine made for others is replaced. None takes what
            is there.
    """
    global _engine, _made_for
    wanted = (False, False, HostSettings(), None) if config is None else _key(config)
    if config is not None and _made_for not in (None, wanted):
        assert _engine is not None
        _engine.host.give_up_idle()
        _engine = None
    if _engine is None:
        _made_for = sync, poison, host, link = wanted
        _engine = SwapEngine(_backend_here(link), sync=sync, poison=poison, host=host)
    return _engine


def set_engine(engine: SwapEngine | None) -> None:
    """Makes every later `get_engine` return `engine`, whatever the settings (tests, benchmarks).

    None goes back to an engine made at the next call.
    """
    global _engine, _made_for
    _engine, _made_for = engine, None


def _key(config: MemoConfig) -> tuple[bool, bool, HostSettings, int | None]:
    return config.sync, config.poison, config.host, config.link_bandwidth


def _backend_here(link: int | None) -> Backend:
    from megatron_memo import platform
    from megatron_memo.platform import stand_in

    if platform.is_active() and stand_in.on_meta():
        from megatron_memo.swap.meta import MetaBackend

        return MetaBackend()
    if platform.is_active() or not torch.cuda.is_available():
        from megatron_memo.swap.cpu import HostThreadBackend

        return HostThreadBackend(link)
    from megatron_memo.swap.cuda import CudaStreamBackend

    return CudaStreamBackend()
