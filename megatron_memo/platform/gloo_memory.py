"""Memory that gloo asks for inside an all-gather belongs to no phase of training.

gloo makes a flat copy of the result while it holds the lock of the group's queue. Its worker, which
may still keep the last collective's tensors, needs that lock to let go of them. So whether such a
request finds the bytes free that it found in a recorded iteration is chance, and waiting for them
cannot help: no memory plan can serve it. NCCL asks for nothing there. Can go when gloo makes the
copy before it takes the lock, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from megatron_memo import phases

# Of torch 2.11 to 2.14: names differ, a version has some of them.
_GATHERS = (
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
)


def install() -> None:
    """Mark each of these calls by a phase of its own."""
    group: Any = ProcessGroup
    for name in _GATHERS:
        if hasattr(group, name):
            setattr(group, name, _marked(getattr(group, name)))


def _marked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with phases.interrupted_by(phases.COLLECTIVE):
            return call(*args, **kwargs)

    return marked
