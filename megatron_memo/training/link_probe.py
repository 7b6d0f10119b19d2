"""Bandwidth to and from host memory, as one rank gets it while all local ranks copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron_memo import platform
from megatron_memo.plan.ratio import Link
from megatron_memo.swap.backend import Backend, Copy

# A copy's size and how long each question is asked. A GPU's link is at its full rate from some tens
# of MiB on; host threads copy what does not fit into a cache.
_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
_SECONDS = 0.15
# For a number in the log that nothing is decided by.
AT_A_GLANCE, GLANCE_BYTES = 0.05, 64 << 20


def measure_link(
    backend: Backend,
    device: torch.device,
    barrier: Callable[[], None],
    seconds: float = _SECONDS,
    most: int | None = None,
) -> Link:
    """Copies for a while: out, in, and both ways at once. Collective over all ranks.

    Args:
        backend: whose streams and host memory are used.
        device: of this rank.
        barrier: returns when every rank has come to it.
        seconds: for each of the three.
        most: bytes of a copy, if they are fewer than what it would take by itself.

    Raises:
        MemoryError: no host memory for the probe.
    """
    nbytes = min(_BYTES[backend.name], most or _BYTES[backend.name])
    buffers = [backend.device_buffer(nbytes, device) for _ in range(2)]
    blocks = [backend.new_host_block(nbytes) for _ in range(2)]
    out, back = (Copy(buffer, block, 0) for buffer, block in zip(buffers, blocks, strict=True))
    rates: list[float] = []
    backend.d2h([out], backend.record_compute()).synchronize()  # touches the pages
    backend.h2d([back], backend.record_compute()).synchronize()
    for ways in ((True, False), (False, True), (True, True)):
        barrier()
        copied, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            events = []
            if ways[0]:
                events.append(backend.d2h([out], None))
            if ways[1]:
                events.append(backend.h2d([back], None))
            for event in events:
                event.synchronize()
            copied += nbytes
        rates.append(copied / (time.perf_counter() - start))
    barrier()
    for block in blocks:
        block.close()
    alone_out, alone_in, both = rates
    return Link(alone_out, alone_in, min(both, alone_out), min(both, alone_in))


def link_of_run(seconds: float = _SECONDS, most: int | None = None) -> Link:
    """`measure_link` for the swap engine of this process, among all ranks of the run."""
    import torch.distributed as dist

    from megatron_memo.swap.engine import get_engine

    def barrier() -> None:
        dist.barrier()

    device = "cpu" if platform.is_active() else f"cuda:{torch.cuda.current_device()}"
    return measure_link(get_engine().backend, torch.device(device), barrier, seconds, most)
