"""Swap backend for machines without CUDA: two host threads copy, really asynchronously.

"Device" memory is then what torch allocates for the layer, "host" memory the blocks of
`swap.host`. Compute runs in the calling thread, so the compute stream is always at its present
point; the copy streams are threads with a queue each. The same protocol runs as on CUDA.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_memo.swap import watch
from megatron_memo.swap.backend import Copy, Event
from megatron_memo.swap.host import HostBlock


class ReachedEvent:
    """A point that lies in the past: everything the calling thread has computed."""

    def synchronize(self) -> None:
        return None


class ThreadEvent:
    """Set by a copy thread; carries the copy's error to whoever waits for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def synchronize(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("an activation copy failed; training cannot go on") from self._error


class CopyThread:
    """One in-order queue of copies: the CPU's stand-in for a CUDA stream.

    Attributes:
        busy_seconds: that its jobs have taken. Only the thread itself writes it.
    """

    def __init__(self, name: str):
        self.busy_seconds = 0.0
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None], after: Event | None) -> ThreadEvent:
        event = ThreadEvent()
        self._jobs.put((job, after, event))
        return event

    def _run(self) -> None:
        while True:
            job, after, event = self._jobs.get()
            error: BaseException | None = None
            try:
                if after is not None:
                    after.synchronize()
                start = time.perf_counter()
                job()
                self.busy_seconds += time.perf_counter() - start
            except BaseException as caught:  # noqa: BLE001 (raised again by ThreadEvent.synchronize)
                error = caught
            # Before the event is set: who waits for it counts on the copy's tensors being let go,
            # and an idle thread must not keep them alive.
            del job, after
            event.finish(error)
            del event


class HostThreadBackend:
    """See `swap.backend.Backend`.

    Args:
        link: bytes a second that each direction has at most; None for what the machine gives.
    """

    name = "cpu"

    def __init__(self, link: int | None = None) -> None:
        self._link = link
        self._d2h = CopyThread("memo-d2h")
        self._h2d = CopyThread("memo-h2d")

    def record_compute(self) -> Event:
        return ReachedEvent()

    def compute_waits(self, event: Event) -> float:
        start = time.perf_counter()
        event.synchronize()
        return time.perf_counter() - start

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> Event:
        return self._d2h.submit(lambda: self._slowed(watch.TO_HOST, copies), after)

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> Event:
        return self._h2d.submit(lambda: self._slowed(watch.TO_DEVICE, copies), after)

    def _slowed(self, direction: str, copies: Sequence[Copy]) -> None:
        """Copies, and sleeps for the rest of what the link would have taken."""
        start = time.perf_counter()
        (copy_to_host if direction == watch.TO_HOST else copy_to_device)(copies)
        if self._link is not None:
            nbytes = sum(one.device.numel() for one in copies)
            time.sleep(max(nbytes / self._link - (time.perf_counter() - start), 0.0))
        watch.tell(direction, start, time.perf_counter(), copies)

    def synchronize(self) -> None:
        for thread in (self._d2h, self._h2d):
            thread.submit(lambda: None, after=None).synchronize()

    def waited_seconds(self) -> tuple[float, float] | None:
        return 0.0, 0.0  # compute is the calling thread

    def busy_seconds(self) -> tuple[float, float] | None:
        return self._d2h.busy_seconds, self._h2d.busy_seconds

    def new_host_block(self, nbytes: int) -> HostBlock:
        return HostBlock(nbytes)

    def device_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


# numpy copies with the GIL released and without torch's intra-op threads, which belong to compute.
def copy_to_host(copies: Sequence[Copy]) -> None:
    for copy in copies:
        n = copy.device.numel()
        copy.host.array[copy.offset : copy.offset + n] = copy.device.numpy()


def copy_to_device(copies: Sequence[Copy]) -> None:
    for copy in copies:
        n = copy.device.numel()
        copy.device.numpy()[:] = copy.host.array[copy.offset : copy.offset + n]
