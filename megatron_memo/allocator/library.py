"""The C ABI of the compiled allocator for ctypes; mirrors csrc/core/types.h and c_api.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_memo.allocator.errors import AllocatorError

OFF, RECORD, REPLAY = 0, 1, 2  # memo::Mode
NATIVE = 2**64 - 1  # memo::kNative, an offset
ANY_VISIT = -1  # memo::kAnyVisit
UNLIMITED = 2**64 - 1  # memo::Ledger::kUnlimited, a budget
NO_PHASE = -1  # memo::kNoPhase: nothing is planned or recorded in it
BLOCKS_LIVE = -2  # of memo_reserve_arena
MALLOC, FREE, PHASE, ITERATION_BEGIN, ITERATION_END = range(5)  # memo::EventKind

EVENT = np.dtype(
    [
        ("kind", np.int32),
        ("phase", np.int32),
        ("id", np.int64),
        ("size", np.uint64),
        ("stream", np.uint64),
        ("thread", np.int64),
    ]
)
ENTRY = np.dtype(
    [
        ("phase", np.int32),
        ("visit", np.int32),
        ("size", np.uint64),
        ("stream", np.uint64),
        ("offset", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since `reset_stats`, but for those marked "now". Sizes in bytes.

    `requests` were matched against the plan: hits + native_entries + miss_unknown + miss_occupied.

    Attributes:
        requests: by planned threads, inside an iteration, at or above the size filter.
        hits: served at the planned address.
        native_entries: matched an entry that leaves them to the native allocator.
        miss_unknown: no entry of that size and stream was within reach.
        miss_occupied: the entry's bytes were still in use.
        miss_thread: from a thread that pushed no marker; never matched, as are the next two.
        miss_small: below the size filter.
        outside: between iterations, before an iteration's first marker, or inside a collective that
            asks for memory of its own (gloo's, see `platform.gloo_memory`).
        hit_bytes, miss_bytes: of hits; of miss_unknown and miss_occupied.
        native_mallocs, native_bytes: requests at or above the filter that the native allocator
            served, in any mode and by any thread.
        arena_size, arena_live, arena_blocks: now.
        arena_peak: most bytes of planned blocks alive at once.
        device_used: now; all blocks given out since the allocator was installed, with the arena
            whole (CPU only).
        device_peak: most of that.
        stream_waits: allocations that had to wait for a side stream.
        late_frees: allocations that waited until another thread had freed their bytes.
        unknown_frees: frees of arena addresses where no block was; above 0 is a fault.
    """

    requests: int
    hits: int
    native_entries: int
    miss_unknown: int
    miss_occupied: int
    miss_thread: int
    miss_small: int
    outside: int
    hit_bytes: int
    miss_bytes: int
    native_mallocs: int
    native_bytes: int
    arena_size: int
    arena_live: int
    arena_peak: int
    arena_blocks: int
    device_used: int
    device_peak: int
    stream_waits: int
    late_frees: int
    unknown_frees: int

    @property
    def hit_rate(self) -> float:
        """Hits by requests that were not for native entries; 1.0 when there were none."""
        wanted = self.requests - self.native_entries
        return self.hits / wanted if wanted else 1.0


class _Stats(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Stats)]


Signatures = dict[str, tuple[list[Any], Any]]  # name -> types of arguments, of the result

_INT, _I32, _I64, _U64 = ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_SIZE, _POINTER, _TEXT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
_CORE: Signatures = {
    "memo_struct_bytes": ([_INT], _U64),
    "memo_configure": ([_U64, _U64], _INT),
    "memo_filter": ([], _U64),
    "memo_alignment": ([], _U64),
    "memo_mode": ([], _INT),
    "memo_set_mode": ([_INT], _INT),
    "memo_load_plan": ([_POINTER, _SIZE], _I64),
    "memo_name_phase": ([_I32, _TEXT], None),
    "memo_begin_iteration": ([], None),
    "memo_end_iteration": ([], None),
    "memo_enter": ([_I32], None),
    "memo_event_count": ([], _SIZE),
    "memo_copy_events": ([_POINTER, _SIZE], _SIZE),
    "memo_clear_events": ([], None),
    "memo_stats": ([_POINTER], None),
    "memo_reset_stats": ([], None),
    "memo_set_budget": ([_U64], None),
}
FRONT_END: Signatures = {
    "memo_torch_version": ([], _TEXT),
    "memo_install": ([], _INT),
    "memo_reserve_arena": ([_U64], _INT),
    "memo_error": ([], _TEXT),
}


def load(path: Path, functions: Signatures) -> ctypes.PyDLL:
    """Loads a library that exports the core's functions and those given.

    The lock of Python is kept through a call: a marker then costs a fraction of a microsecond, and
    no function calls back into Python.

    Raises:
        AllocatorError: it can't be loaded, lacks a function, or lays out its structures otherwise.
    """
    try:
        library = ctypes.PyDLL(str(path))
        for name, (arguments, result) in {**_CORE, **functions}.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise AllocatorError(f"the compiled allocator {path} can't be loaded: {error}") from error
    expected = [EVENT.itemsize, ENTRY.itemsize, ctypes.sizeof(_Stats)]
    found = [library.memo_struct_bytes(which) for which in range(len(expected))]
    if found != expected:
        raise AllocatorError(f"the compiled allocator {path} is of another version: delete it")
    return library


def read_stats(library: ctypes.PyDLL) -> Stats:
    raw = _Stats()
    library.memo_stats(ctypes.byref(raw))
    return Stats(*(getattr(raw, field.name) for field in fields(Stats)))


def read_events(library: ctypes.PyDLL) -> np.ndarray:
    """The recorded events, of type EVENT, in order."""
    events = np.zeros(library.memo_event_count(), dtype=EVENT)
    count = library.memo_copy_events(events.ctypes.data, len(events))
    return events[:count]
