"""Swap backend for profiles: nothing is copied, host memory is counted and never taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_memo.ops.fused import compile_as_region
from megatron_memo.swap.backend import Copy, Event
from megatron_memo.swap.cpu import ReachedEvent
from megatron_memo.swap.host import HostBlock


class CountedBlock(HostBlock):
    """A size; the pool keeps the books."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    def close(self) -> None:
        """Nothing was taken."""


class MetaBackend:
    """See `swap.backend.Backend`. Every copy is done at once, since there is nothing to copy."""

    name = "meta"

    def record_compute(self) -> Event:
        return ReachedEvent()

    def compute_waits(self, event: Event) -> float:
        return 0.0

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> Event:
        return ReachedEvent()

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> Event:
        return ReachedEvent()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def waited_seconds(self) -> tuple[float, float] | None:
        return None

    def busy_seconds(self) -> tuple[float, float] | None:
        return None

    def new_host_block(self, nbytes: int) -> HostBlock:
        return CountedBlock(nbytes)

    def device_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        return swap_buffer(nbytes, device)


@compile_as_region
def swap_buffer(nbytes: int, device: torch.device) -> Tensor:
    """A function of its own so that a trace has the buffer under this name."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
