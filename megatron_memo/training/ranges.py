"""NVTX ranges named for layer and chunk, in the iterations that Megatron profiles for Nsight."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_memo import phases
from megatron_memo.phases import Phase


class Ranges:
    """Turns phases into ranges; `step` goes to `compat.wrap_train_step`.

    Ranges of NVTX's start/end kind, which may begin on one thread and end on another: backward of a
    GPU's layers runs on a thread of autograd's own.

    Args:
        wanted: iterations (from 1) to annotate.
        start: opens a range of this name and returns a handle.
        end: closes it.
    """

    def __init__(
        self, wanted: range, start: Callable[[str], Any], end: Callable[[Any], Any]
    ) -> None:
        self._wanted = wanted
        self._start = start
        self._end = end
        self._open: Any = None

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step, under ranges if it is one of the wanted."""
        if iteration not in self._wanted:
            return run()
        try:
            with phases.listening(self._enter):
                return run()
        finally:
            self._close()

    def _enter(self, phase: Phase) -> None:
        self._close()
        self._open = self._start(f"memo: {phase}")

    def _close(self) -> None:
        if self._open is not None:
            self._end(self._open)
            self._open = None


def nvtx_ranges(args: Namespace) -> Ranges | None:
    """What `--profile --nvtx-ranges` asks of this rank; None where it does not.

    Args:
        args: Megatron's, validated; the profiled iterations are those of its training loop.
    """
    import torch

    if not (args.profile and getattr(args, "nvtx_ranges", False)):  # a flag since 0.18
        return None
    if args.profile_ranks and args.rank not in args.profile_ranks:
        return None
    # Upstream's loop counts finished iterations: it profiles from `start` until `end` are finished.
    wanted = range(args.profile_step_start + 1, args.profile_step_end + 1)
    return Ranges(wanted, torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)
