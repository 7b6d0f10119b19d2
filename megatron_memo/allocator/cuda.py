"""The allocator of a GPU: which stream is planned, on top of what every front-end does.

Seen on a stubbed driver with torch's real caching allocator (tests/stub_cuda); not yet on hardware.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from megatron_memo import platform
from megatron_memo.allocator import library as abi
from megatron_memo.allocator.build import build
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import Allocator, PlanEntry, load_and_install
from megatron_memo.sizes import size_words


class CudaAllocator(Allocator):
    """See `face.Allocator`. One stream of one device is planned: that which is current when a
    recording starts, or, without one, when the first plan is loaded. Requests of other streams are
    recorded and left to the native allocator. What graph captures, MemPools and other devices ask
    for is left to it too, and not counted in `stats`.
    """

    @classmethod
    def installed(cls) -> CudaAllocator:
        """Builds, loads and installs it. Raises AllocatorError; see `face.get_allocator`."""
        import torch

        if platform.is_active() or not torch.cuda.is_available():
            raise AllocatorError(
                "the planned allocator for CUDA needs a CUDA device, there is none"
            )
        torch.cuda.init()
        return cls(load_and_install(build("cuda")))

    def __init__(self, library: ctypes.PyDLL) -> None:
        super().__init__(library)
        self._arena_budget: int | None = None
        library.memo_plan_current_stream.argtypes = []
        library.memo_plan_current_stream.restype = ctypes.c_int

    def start_recording(self) -> None:
        """Records requests and frees of coming iterations; ends a replay. The current stream is the
        planned one from now on; when it was another, the arena and the plan are dropped.

        Raises:
            AllocatorError: blocks of the other stream's arena are still in use.
        """
        self.off()
        status = self._library.memo_plan_current_stream()
        if status == abi.BLOCKS_LIVE:
            raise AllocatorError(
                f"{self.stats().arena_blocks} planned blocks of another stream are still in use: "
                "the current stream can't be planned"
            )
        if status < 0:
            raise AllocatorError(f"the current CUDA stream can't be planned: {self._error()}")
        super().start_recording()

    def load_plan(self, entries: Sequence[PlanEntry], arena_bytes: int) -> None:
        """See `face.Allocator`. Raises AllocatorError also for an arena above the budget."""
        if self._arena_budget is not None and arena_bytes > self._arena_budget:
            super().load_plan([], 0)
            raise AllocatorError(
                f"the plan needs an arena of {size_words(arena_bytes)}, but the device budget is "
                f"{size_words(self._arena_budget)}: plan for that budget, or raise it"
            )
        super().load_plan(entries, arena_bytes)

    def set_budget(self, nbytes: int | None) -> None:
        """Limits the arena to so many bytes; None: no limit. What is not planned is limited by the
        device, and by `torch.cuda.set_per_process_memory_fraction`."""
        super().set_budget(nbytes)
        self._arena_budget = nbytes
