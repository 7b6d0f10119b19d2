"""Swap backends that schedule copies as badly as the protocol allows.

On a GPU the order of unordered work is up to the hardware; here it is chosen, so that a missing
wait shows every time. `Late` runs a copy only when somebody waits for it (or for a later one of its
stream). `Early` runs it at once where its `after` event says it may; a copy that waits for nothing
could have run before compute wrote the source, or before compute was done with the buffer's memory,
and moves garbage.
"""

import random
import time
from collections import deque

import torch

from megatron_memo.swap.cpu import (
    HostThreadBackend,
    ReachedEvent,
    copy_to_device,
    copy_to_host,
)
from megatron_memo.swap.host import HostBlock

GARBAGE = 0xFF


class LateEvent:
    def __init__(self, stream):
        self._stream = stream

    def synchronize(self):
        self._stream.run_up_to(self)


class LateStream:
    def __init__(self):
        self._jobs = deque()

    def submit(self, job):
        event = LateEvent(self)
        self._jobs.append((job, event))
        return event

    def run_up_to(self, event):
        while self._jobs and any(e is event for _, e in self._jobs):
            job, _ = self._jobs.popleft()
            job()

    def run_all(self):
        while self._jobs:
            self._jobs.popleft()[0]()


class _Synchronous:
    """What both schedules share: compute is the calling thread."""

    name = "adversary"

    def record_compute(self):
        return ReachedEvent()

    def compute_waits(self, event):
        event.synchronize()
        return 0.0

    def synchronize(self):
        """Nothing is under way that a block's end could disturb: a late copy holds its block."""

    def waited_seconds(self):
        return 0.0, 0.0

    def busy_seconds(self):
        return None

    def new_host_block(self, nbytes):
        return HostBlock(nbytes)

    def device_buffer(self, nbytes, device):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Late(_Synchronous):
    def __init__(self):
        self.d2h_stream, self.h2d_stream = LateStream(), LateStream()

    def d2h(self, copies, after):
        return self.d2h_stream.submit(lambda: copy_to_host(copies))

    def h2d(self, copies, after):
        def job():
            if after is not None:
                after.synchronize()
            copy_to_device(copies)

        return self.h2d_stream.submit(job)


class Early(_Synchronous):
    def d2h(self, copies, after):
        if after is None:
            for copy in copies:
                copy.host.array[copy.offset : copy.offset + copy.device.numel()] = GARBAGE
        else:
            after.synchronize()
            copy_to_host(copies)
        return ReachedEvent()

    def h2d(self, copies, after):
        if after is None:
            for copy in copies:  # copied, then overwritten by whoever still had the memory
                copy.device.fill_(GARBAGE)
        else:
            after.synchronize()
            copy_to_device(copies)
        return ReachedEvent()


class Delayed(HostThreadBackend):
    """The real backend with copies that take long, at random, in one direction or both."""

    def __init__(self, *, d2h_seconds=0.0, h2d_seconds=0.0, seed=0):
        super().__init__()
        self._seconds = {"d2h": d2h_seconds, "h2d": h2d_seconds}
        self._random = random.Random(seed)

    def _slow(self, direction, copy_all, copies):
        def job():
            for copy in copies:
                time.sleep(self._random.random() * self._seconds[direction])
                copy_all([copy])

        return job

    def d2h(self, copies, after):
        return self._d2h.submit(self._slow("d2h", copy_to_host, copies), after)

    def h2d(self, copies, after):
        return self._h2d.submit(self._slow("h2d", copy_to_device, copies), after)
