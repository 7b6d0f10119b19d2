"""The allocator as Python sees it.

NOTE: an iteration
------------------
    allocator = get_allocator("cpu")      # installed in off mode; nothing changes for anybody
    allocator.start_recording()
    allocator.begin_iteration(); allocator.enter(phase); ...; allocator.end_iteration()
    raw = allocator.stop_recording()      # record.to_trace(raw, ...) makes a trace of it
    allocator.load_plan(entries, arena_bytes)
    allocator.replay()

From then on every iteration between `begin_iteration` and `end_iteration` follows the plan, and
whatever else runs (evaluation, checkpoints, data loading) does not. `begin_iteration` also ends an
iteration that an exception broke off. A request that differs from the plan goes to the native
allocator, and the next iteration starts afresh: nothing has to be repaired.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_memo.allocator import library as abi
from megatron_memo.allocator.build import build
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.library import Stats
from megatron_memo.sizes import size_words

# Bytes. Requests below are left alone: they are many, vary most (scalars of a log line), and
# together are nothing beside activations.
DEFAULT_FILTER = 4096


class PlanEntry(NamedTuple):
    """One request that is expected.

    Attributes:
        phase: as given to `Allocator.enter`, from 0.
        size: bytes asked for.
        stream: 0 for the arena's own stream; entries of others must be native.
        offset: bytes from the arena's start, a multiple of `Allocator.alignment`; None leaves the
            request to the native allocator.
        visit: which time in an iteration the phase is entered, from 0; None for one after another
            in whichever visit they come.
    """

    phase: int
    size: int
    stream: int
    offset: int | None
    visit: int | None = None


class Allocator:
    """One device's installed allocator; get it from `get_allocator`.

    Attributes:
        enter: `enter(phase)` marks that a phase (a number from 0) begins; under a microsecond. The
            calling thread's requests are planned from then on. It has no further effect outside an
            iteration, or for the phase that is being marked already.
        alignment: bytes; of every offset, and what lengths in the arena are rounded up to.
    """

    enter: Callable[[int], None]

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self.enter = library.memo_enter
        self.alignment: int = library.memo_alignment()

    # ---- recording

    def start_recording(self) -> None:
        """Records requests and frees of coming iterations; ends a replay."""
        self._set_mode(abi.RECORD)

    def stop_recording(self) -> np.ndarray:
        """Ends the recording. The events in order, as an array of type `library.EVENT`.

        Blocks that were alive before it began are unknown to it; their frees are not among the
        events. Raises AllocatorError when nothing was being recorded.
        """
        if self._library.memo_mode() != abi.RECORD:
            raise AllocatorError("no recording of memory requests is running")
        self.off()
        events = abi.read_events(self._library)
        self._library.memo_clear_events()
        return events

    # ---- replaying

    def load_plan(self, entries: Sequence[PlanEntry], arena_bytes: int) -> None:
        """Takes a plan and reserves its arena; `replay` puts it to use. No entries and 0 bytes give
        the arena back.

        Args:
            entries: in the order of the requests. Those below the filter are left out.
            arena_bytes: the plan's peak; no entry may end above it, rounded up to the alignment.

        Raises:
            AllocatorError: an entry does not fit; blocks of the last plan are alive and another
                size of arena is needed; there is no memory for the arena. There is no plan then.
        """
        table = _table(entries)
        stats = self.stats()
        size = -(-arena_bytes // self.alignment) * self.alignment
        if size != stats.arena_size:
            self._reserve(size, stats)
        wrong = self._library.memo_load_plan(table.ctypes.data, len(table))
        if wrong >= 0:
            raise AllocatorError(
                f"plan entry {wrong}, {entries[wrong]}, is not right: an offset is a multiple of "
                f"{self.alignment}, ends within the arena of {size} bytes and is of stream 0"
            )

    def _reserve(self, size: int, stats: Stats) -> None:
        status = self._library.memo_reserve_arena(size)
        if status == abi.BLOCKS_LIVE:
            raise AllocatorError(
                f"{stats.arena_blocks} planned blocks ({size_words(stats.arena_live)}) are still "
                f"in use: the arena of {size_words(stats.arena_size)} can't be replaced by one of "
                f"{size_words(size)}"
            )
        if status < 0:
            raise AllocatorError(f"no arena of {size_words(size)}: {self._error()}")

    def replay(self) -> None:
        """Coming iterations follow the plan."""
        self._set_mode(abi.REPLAY)

    def off(self) -> None:
        """Everything goes to the native allocator; planned blocks live on until they are freed."""
        self._set_mode(abi.OFF)

    # ---- boundaries

    def begin_iteration(self) -> None:
        """Planning is on from the next `enter`, at the plan's start."""
        self._library.memo_begin_iteration()

    def end_iteration(self) -> None:
        """Planning is off until the next `begin_iteration`."""
        self._library.memo_end_iteration()

    # ---- settings

    @property
    def filter(self) -> int:
        """Bytes; smaller requests are neither recorded nor planned."""
        return self._library.memo_filter()

    def set_filter(self, nbytes: int) -> None:
        """Sets `filter` and drops the plan. Raises AllocatorError unless off, without live blocks
        in the arena."""
        if nbytes < 1 or not self._library.memo_configure(self.alignment, nbytes):
            raise AllocatorError(
                f"the size filter can't be set to {nbytes} bytes: it is at least 1, and is set "
                "while the allocator is off and no planned block is in use"
            )

    def set_budget(self, nbytes: int | None) -> None:
        """Limits the bytes of all tensors made since the allocator was installed, with the arena.

        A request beyond raises torch.OutOfMemoryError with sizes, budget and top holders. None: no
        limit. Only the CPU has one; on a GPU the device itself is the limit.
        """
        if nbytes is not None and not 0 < nbytes < abi.UNLIMITED:
            raise AllocatorError(f"the device budget is {nbytes} bytes, it must be above 0")
        self._library.memo_set_budget(abi.UNLIMITED if nbytes is None else nbytes)

    def name_phases(self, names: Mapping[int, str]) -> None:
        """What phases are called in an out-of-memory error."""
        for phase, name in names.items():
            self._library.memo_name_phase(phase, name.encode())

    # ---- what was seen

    def stats(self) -> Stats:
        """Counters since `reset_stats`."""
        return abi.read_stats(self._library)

    def reset_stats(self) -> None:
        """Starts a new interval of `stats`."""
        self._library.memo_reset_stats()

    def _set_mode(self, mode: int) -> None:
        if not self._library.memo_set_mode(mode):
            raise AllocatorError("a forked process neither records nor replays memory requests")

    def _error(self) -> str:
        return self._library.memo_error().decode(errors="replace")


def _table(entries: Sequence[PlanEntry]) -> np.ndarray:
    """The entries as the library reads them. Raises AllocatorError for numbers out of range."""
    try:
        return np.array(
            [
                (
                    entry.phase,
                    abi.ANY_VISIT if entry.visit is None else entry.visit,
                    entry.size,
                    entry.stream,
                    abi.NATIVE if entry.offset is None else entry.offset,
                )
                for entry in entries
            ],
            dtype=abi.ENTRY,
        )
    except OverflowError as error:
        raise AllocatorError(f"a number in the plan is out of range: {error}") from error


@cache
def get_allocator(device: str = "cpu") -> Allocator:
    """The process's allocator for a device: built if need be, loaded, and installed in off mode.

    Raises:
        AllocatorError: there is no front-end for the device, no compiler, another torch than the
            one it was built for, or another allocator in its place.
    """
    if device == "cuda":
        from megatron_memo.allocator.cuda import CudaAllocator  # which needs this module

        return CudaAllocator.installed()
    return Allocator(load_and_install(build(device)))


def load_and_install(path: Path) -> ctypes.PyDLL:
    """Loads a built library, checks that it fits this torch, and installs it.

    Raises AllocatorError.
    """
    import torch

    library = abi.load(path, abi.FRONT_END)
    built_for = library.memo_torch_version().decode()
    if built_for != torch.__version__:
        raise AllocatorError(
            f"the compiled allocator {path} was built for torch {built_for}, but torch is "
            f"{torch.__version__}: delete the file, it is then built anew"
        )
    if library.memo_install() < 0:
        reason = library.memo_error().decode(errors="replace")
        raise AllocatorError(f"the planned allocator can't be installed: {reason}")
    if not library.memo_configure(library.memo_alignment(), DEFAULT_FILTER):
        raise AllocatorError("the planned allocator is in use by another part of this process")
    return library
