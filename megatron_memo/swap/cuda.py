"""Swap backend for CUDA: two streams, events, host memory registered in place.

Seen on a stubbed driver (tests/stub_cuda): order of streams and events, registration, copies. Not
yet seen on hardware: no GPU was at hand when this was written.
"""

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_memo.swap import numa, watch
from megatron_memo.swap.backend import Copy, Event
from megatron_memo.swap.host import HostBlock

MOST_EVENTS_WAITING = 256  # pairs, before those that are over are read


class RegisteredBlock(HostBlock):
    """Host memory page-locked where it lies, so that copies are asynchronous.

    Args:
        nbytes: its size.
        node: the NUMA node whose memory it should be; None for any.

    It is unlocked when it is closed, and also when it is collected without that, as with an engine
    that was replaced: the addresses would stay locked, and the next mapping there could not be.
    """

    def __init__(self, nbytes: int, node: int | None = None):
        super().__init__(nbytes)
        address = self.tensor.data_ptr()
        if node is not None:
            refused = numa.prefer(address, nbytes, node)
            if refused is not None:
                _warn_once(f"host memory does not come from NUMA node {node}: {refused}")
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            raise MemoryError(
                f"CUDA could not page-lock {nbytes} bytes (cudaHostRegister: error {int(status)}); "
                "check `ulimit -l` and the container's memory limit"
            )
        self._unlock = weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)
        self._unlock.atexit = False  # with the process all of it goes

    def close(self) -> None:
        self._unlock()
        super().close()


class CudaStreamBackend:
    """See `swap.backend.Backend`."""

    name = "cuda"

    def __init__(self) -> None:
        self._d2h = torch.cuda.Stream()
        self._h2d = torch.cuda.Stream()
        self._d2h_clock, self._h2d_clock = _Clock(), _Clock()
        self._d2h_waits, self._h2d_waits = _Clock(), _Clock()
        device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._node = numa.node_of(device.pci_domain_id, device.pci_bus_id, device.pci_device_id)

    def record_compute(self) -> Event:
        return torch.cuda.current_stream().record_event()

    def compute_waits(self, event: Event) -> float:
        stream = torch.cuda.current_stream()
        waits = event.waits if isinstance(event, _TimedEvent) else None
        start = None if waits is None else stream.record_event(_timed())
        stream.wait_event(event)
        if waits is not None and start is not None:
            waits.note(start, stream.record_event(_timed()))
        return 0.0

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> Event:
        with torch.cuda.stream(self._d2h):
            if after is not None:
                self._d2h.wait_event(after)
            start = self._d2h.record_event(_timed())
            for copy in copies:
                _host_view(copy).copy_(copy.device, non_blocking=True)
            end = self._d2h.record_event(_timed(self._d2h_waits))
            watch.tell(watch.TO_HOST, start, end, copies)
            return self._d2h_clock.note(start, end)

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> Event:
        with torch.cuda.stream(self._h2d):
            if after is not None:
                self._h2d.wait_event(after)
            start = self._h2d.record_event(_timed())
            for copy in copies:
                copy.device.copy_(_host_view(copy), non_blocking=True)
            end = self._h2d.record_event(_timed(self._h2d_waits))
            watch.tell(watch.TO_DEVICE, start, end, copies)
            return self._h2d_clock.note(start, end)

    def synchronize(self) -> None:
        self._d2h.synchronize()
        self._h2d.synchronize()

    def waited_seconds(self) -> tuple[float, float] | None:
        return self._d2h_waits.seconds(), self._h2d_waits.seconds()

    def busy_seconds(self) -> tuple[float, float] | None:
        return self._d2h_clock.seconds(), self._h2d_clock.seconds()

    def new_host_block(self, nbytes: int) -> HostBlock:
        return RegisteredBlock(nbytes, self._node)

    def device_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _Clock:
    """Time between pairs of events of one stream, read when they have come to pass."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._waiting: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def note(self, start: torch.cuda.Event, end: torch.cuda.Event) -> torch.cuda.Event:
        """Counts the time from `start` to `end`, in time; returns `end`."""
        self._waiting.append((start, end))
        if len(self._waiting) > MOST_EVENTS_WAITING:  # nobody asks
            self.seconds()
        return end

    def seconds(self) -> float:
        """Of all pairs that are over. Waits for nothing."""
        while self._waiting and self._waiting[0][1].query():
            start, end = self._waiting.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds


class _TimedEvent(torch.cuda.Event):
    """Attributes:
    waits: counts how long compute stands still for it; None if nobody waits for it.
    """

    waits: _Clock | None = None


def _timed(waits: _Clock | None = None) -> _TimedEvent:
    event = _TimedEvent(enable_timing=True)
    event.waits = waits
    return event


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(f"megatron_memo: {text}", stacklevel=2)


def _host_view(copy: Copy) -> Tensor:
    return copy.host.tensor[copy.offset : copy.offset + copy.device.numel()]
