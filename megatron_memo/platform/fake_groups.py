"""Collectives of meta tensors, in process groups of one process that plays a rank of many.

Why: torch's fake process group (Megatron's ``--fake-process-group``) skips all communication, which
is what a profile wants, but a few of its ways were never opened for meta tensors. Buffers of a
collective are its caller's, as on NCCL, so nothing is allocated here.
"""

from __future__ import annotations

import torch

_COALESCED = (
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
    "allreduce_coalesced_",
)
_library: torch.library.Library | None = None  # registrations live as long as it does


def install() -> None:
    """Let the fake group serve meta tensors; ``torch.distributed`` has no group yet."""
    global _library
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers the backend
    from torch._C._distributed_c10d import FakeWork

    # Point-to-point operations ask for the backend of their tensors' device.
    served = dist.Backend.backend_capability["fake"]
    if "meta" not in served:
        served.append("meta")

    _library = torch.library.Library("c10d", "IMPL", "Meta")
    for name in _COALESCED:
        _library.impl(name, lambda *args, **kwargs: FakeWork().boxed())
