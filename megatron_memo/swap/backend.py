"""What the swap engine needs of a device: a compute stream, a D2H stream and an H2D stream."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_memo.swap.host import HostBlock

# A point on a stream: `synchronize()` blocks the calling thread until everything before the point
# is done. torch.cuda.Event on CUDA, ReachedEvent and ThreadEvent on CPU.
Event = Any


class Copy(NamedTuple):
    """One storage's bytes: device tensor (flat uint8) and its place in a host block."""

    device: Tensor
    host: HostBlock
    offset: int  # bytes


class Backend(Protocol):
    """Three streams of one device. Nothing here allocates device memory on a side stream.

    The compute stream is asked for at each call (`torch.cuda.current_stream()`), never cached:
    Megatron and users run layers on streams of their own.
    """

    name: str

    def record_compute(self) -> Event:
        """The point that the compute stream has reached."""

    def compute_waits(self, event: Event) -> float:
        """Orders later compute after `event`; seconds that the calling thread stood still.

        Where the stream stands still instead, `waited_seconds` tells.
        """

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> Event:
        """Enqueues device -> host copies on the D2H stream, ordered after `after`."""

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> Event:
        """Enqueues host -> device copies on the H2D stream, ordered after `after`."""

    def new_host_block(self, nbytes: int) -> HostBlock:
        """Host memory that both copy streams can use."""

    def synchronize(self) -> None:
        """Blocks until every copy so far is done."""

    def waited_seconds(self) -> tuple[float, float] | None:
        """Seconds since the start that the compute stream stood still for copies to the host and
        to the device, those aside that `compute_waits` returned. As for `busy_seconds`.
        """

    def busy_seconds(self) -> tuple[float, float] | None:
        """Seconds that copies to the host and to the device have taken since the start.

        Copies that are under way may not be counted yet: nothing is waited for. None where the
        backend cannot tell.
        """

    def device_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        """Flat uint8 device buffer on `device`, allocated on the compute stream."""
