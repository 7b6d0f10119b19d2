"""A trace from PyTorch's memory snapshot, the pickle of ``torch.cuda.memory._dump_snapshot``.

The file is a dictionary (torch 2.11 to 2.14: torch/csrc/cuda/Module.cpp, `_cuda_memorySnapshot`;
from C++ torch/csrc/cuda/memory_snapshot.cpp, the same):

    device_traces    for each device the history, oldest first: {"action", "addr", "size", "stream",
                     "frames", ...}; a ring buffer, so that the oldest entries may be lost
    segments         what is reserved at the end, with its blocks: {"address", "size",
                     "requested_size", "state", "frames"}

NOTE: the history of a block is ``alloc``, ``free_requested`` (the program gave it up) and
``free_completed`` (its bytes can be used again: later than that only where another stream still
worked on it). A block lives until ``free_completed`` here. Sizes of the history are those asked
for. An address names different blocks at different times, so blocks are numbered anew.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron_memo.phases import START

from .snapshot_window import Repeat, find_repeat, iteration_start
from .trace import Event, Free, Header, Malloc, Trace, TraceError

ALLOC, ASKED_FREE, DONE_FREE = "alloc", "free_requested", "free_completed"
ROUNDING = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp
HOW_TO_RECORD = (
    'Call torch.cuda.memory._record_memory_history(enabled="all", max_entries=1_000_000) before '
    "training, and torch.cuda.memory._dump_snapshot(FILE) after three or more iterations."
)

Record = dict[str, Any]


class SnapshotError(ValueError):
    """A snapshot cannot be read, or says too little. The message is one line for the user."""


@dataclass(frozen=True)
class Window:
    """Events [start, stop) of a device's history.

    Attributes:
        how: how it was chosen, in words.
    """

    start: int
    stop: int
    how: str


@dataclass
class _Block:
    """One block; `born` and `died` are positions in the history.

    born is -1 for a block older than the history, died None for one that outlives it.
    """

    size: int
    stream: int
    what: str
    born: int
    died: int | None = None


@dataclass
class _History:
    """All blocks that a device's history and the state at its end speak of."""

    blocks: list[_Block] = field(default_factory=list)
    older: int = 0  # given back in the history, asked for before it
    late: int = 0  # given back after another stream had finished with them
    lost_frees: int = 0
    empty: int = 0
    failures: list[int] = field(default_factory=list)
    unknown_at_end: int = 0


def read_snapshot(path: Path) -> Record:
    """Loads a snapshot's pickle without running anything that is in it.

    Raises:
        SnapshotError: not there, no pickle, one with more in it than plain values, or one that is
            no snapshot of memory. The message names the file.
    """
    try:
        with open(path, "rb") as file, _without_collection():
            snapshot = _PlainUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None
    except (
        pickle.UnpicklingError,
        EOFError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:  # what the pickle module lets through for damaged bytes
        raise SnapshotError(f"{path}: this is no pickle, or a damaged one ({error})") from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise SnapshotError(
            f"{path}: this is no memory snapshot of PyTorch: it has no device_traces. "
            f"{HOW_TO_RECORD}"
        )
    return snapshot


def import_snapshot(
    path: Path,
    *,
    device: int | None = None,
    start: int | None = None,
    stop: int | None = None,
) -> Trace:
    """The requests of one iteration of a run that somebody recorded.

    Args:
        path: the pickle.
        device: whose history; None takes the only one there is.
        start, stop: events [start, stop) of it, counted from 0 in ``device_traces``. One without
            the other reaches to the end of the history; without both the last full iteration is
            looked for.

    Returns:
        A trace without phases (a snapshot knows none), whose notes say what was chosen and what is
        missing.

    Raises:
        SnapshotError: see `read_snapshot`; also no history, a device or events that it does not
            have, no iteration that repeats. The message names the file.
    """
    snapshot = read_snapshot(path)
    try:
        device = choose_device(snapshot, device)
        history = snapshot["device_traces"][device]
        _check_history(history)
        window = choose_window(history, start, stop)
        return _trace(snapshot, device, window)
    except (SnapshotError, TraceError) as error:
        raise SnapshotError(f"{path}: {error}") from None


def choose_device(snapshot: Record, device: int | None) -> int:
    """The device asked for, or the only one with a history.

    Raises:
        SnapshotError: none or several have a history, or the one asked for has none.
    """
    traces = snapshot["device_traces"]
    recorded = [number for number, history in enumerate(traces) if history]
    if not recorded:
        raise SnapshotError(f"the snapshot has no history of requests. {HOW_TO_RECORD}")
    names = ", ".join(map(str, recorded))
    if device is not None and device not in recorded:
        raise SnapshotError(f"--device {device}: no history of that device, only of {names}")
    if device is None and len(recorded) > 1:
        raise SnapshotError(f"there are histories of the devices {names}. Choose with --device N")
    return recorded[0] if device is None else device


def choose_window(history: Sequence[Record], start: int | None, stop: int | None) -> Window:
    """The events asked for, or the last full iteration.

    Raises:
        SnapshotError: events outside of the history, or nothing repeats.
    """
    if start is None and stop is None:
        return _last_iteration(history)
    first, end = start or 0, len(history) if stop is None else stop
    if not 0 <= first < end <= len(history):
        raise SnapshotError(
            f"--from {first} --to {end}: the history has the events 0 to {len(history)} (not "
            "included), and the first must come before the last"
        )
    return Window(first, end, "chosen by --from and --to")


def _last_iteration(history: Sequence[Record]) -> Window:
    end_of_life = _end_of_life(history)
    given_up = ASKED_FREE if any(e["action"] == ASKED_FREE for e in history) else DONE_FREE
    # Python's garbage collector may give tensors back at other times in each iteration, so that
    # requests alone repeat where requests and frees do not.
    for kinds, words in (((ALLOC, given_up), "requests and frees"), ((ALLOC,), "requests alone")):
        places = [k for k, entry in enumerate(history) if entry["action"] in kinds]
        entries = (history[k] for k in places)
        repeat = find_repeat([(e["action"], e["size"], e["stream"]) for e in entries])
        if repeat is not None:
            return _window(history, places, repeat, end_of_life, words)
    raise SnapshotError(
        f"no iteration repeats in the {len(history)} events of the history, so that none can be "
        "told from the rest. Choose one with --from EVENT --to EVENT, or record three iterations "
        "or more"
    )


def _window(
    history: Sequence[Record], places: list[int], repeat: Repeat, end_of_life: str, words: str
) -> Window:
    change = np.zeros(len(history) + 1, np.int64)
    for k, entry in enumerate(history):
        if entry["action"] == ALLOC:
            change[k + 1] = entry["size"]
        elif entry["action"] == end_of_life:
            change[k + 1] = -entry["size"]
    alive = np.cumsum(change)[places]
    first = iteration_start(repeat, alive)
    last = first + repeat.period
    stop = places[last] if last < len(places) else len(history)
    how = (
        f"the last full iteration: {repeat.period} {words} that come {repeat.times} times in a "
        "row; --from and --to choose otherwise"
    )
    return Window(places[first], stop, how)


def _end_of_life(history: Sequence[Record]) -> str:
    """The action that ends a block: recorders may be told to leave out one of the two."""
    return DONE_FREE if any(e["action"] == DONE_FREE for e in history) else ASKED_FREE


def _trace(snapshot: Record, device: int, window: Window) -> Trace:
    history = snapshot["device_traces"][device]
    found = _blocks(history, snapshot, device)
    streams: dict[int, int] = {0: 0}  # handles differ between runs, so streams are numbered
    held: list[Malloc] = []
    timed: list[tuple[int, bool, Event]] = []  # at one time, a free comes before a request
    ordered = sorted(found.blocks, key=lambda block: block.born)
    for number, block in enumerate(ordered):
        died = len(history) if block.died is None else block.died
        if block.born >= window.stop or died < window.start:
            continue
        stream = streams.setdefault(block.stream, len(streams))
        request = Malloc(number, block.size, stream, block.what)
        if block.born < window.start:
            held.append(request)
        else:
            timed.append((block.born, True, request))
        if died < window.stop:
            timed.append((died, False, Free(number)))
    timed.sort(key=lambda entry: entry[:2])
    events = tuple(event for _, _, event in timed)
    if not any(isinstance(event, Malloc) for event in events):
        raise SnapshotError(
            f"the events {window.start} to {window.stop} hold no request for memory. Choose "
            "others with --from EVENT --to EVENT"
        )
    notes = (_say_window(window, device, history), *_say_faults(found), *_say_settings(snapshot))
    header = Header("snapshot", rounding=ROUNDING, notes=notes)
    return Trace(header, (START,), events, tuple(held))


def _blocks(history: Sequence[Record], snapshot: Record, device: int) -> _History:
    """Follows every address through the history, then meets the state at its end."""
    end_of_life = _end_of_life(history)
    found = _History()
    alive: dict[int, _Block] = {}
    asked: dict[int, int] = {}
    words = _Words()
    for time, entry in enumerate(history):
        action = entry["action"]
        if action == "oom":
            found.failures.append(time)
        if action not in (ALLOC, ASKED_FREE, DONE_FREE):
            continue
        address, size = entry["addr"], entry["size"]
        if action == ASKED_FREE:
            asked[address] = time
        if action == ALLOC:
            if size == 0:
                found.empty += 1
                continue
            block = _Block(size, entry["stream"], words.of(entry), time)
            if address in alive:  # recording was off when it was given back
                found.lost_frees += 1
                alive[address].died = time
            alive[address] = block
            found.blocks.append(block)
        elif action == end_of_life and size > 0:
            gone = alive.pop(address, None)
            if gone is None:
                found.older += 1
                gone = _Block(size, entry["stream"], "before the history", -1)
                found.blocks.append(gone)
            gone.died = time
            if action == DONE_FREE and time - asked.pop(address, time - 1) > 1:
                found.late += 1
    _meet_the_end(found, alive, snapshot, device, end_of_life, words)
    return found


def _meet_the_end(
    found: _History,
    alive: dict[int, _Block],
    snapshot: Record,
    device: int,
    end_of_life: str,
    words: _Words,
) -> None:
    """Blocks that are there at the end and that no event named are older than the history."""
    there = set()
    for address, block in _blocks_at_the_end(snapshot, device):
        # "active_pending_free": given up, but another stream still works on it.
        if block["state"] != "active_allocated" and end_of_life == ASKED_FREE:
            continue
        there.add(address)
        if address not in alive:
            size = block["requested_size"]
            found.blocks.append(_Block(size, block["stream"], words.of(block), -1))
    found.unknown_at_end = sum(address not in there for address in alive)


def _blocks_at_the_end(snapshot: Record, device: int) -> Iterator[tuple[int, Record]]:
    """Address and record of the blocks in use, each with the stream of its segment."""
    try:
        for segment in snapshot.get("segments", []):
            if segment.get("device", 0) != device:
                continue
            address = segment["address"]
            for block in segment["blocks"]:
                place = block.get("address", address)
                address = place + block["size"]
                if block["state"].startswith("active"):
                    yield place, {**block, "stream": segment["stream"]}
    except (AttributeError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"the segments are not as torch 2.11 to 2.14 writes them ({error!r})"
        ) from error


class _Words:
    """Where a request was made: the innermost Python frame, and who called torch if that is in it.

    Backward has no Python frame unless stacks="all" was recorded; then C++ has the word.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # frames are shared between entries

    def of(self, record: Record) -> str:
        frames = record.get("frames") or ()
        key = id(frames)
        if key not in self._known:
            try:
                self._known[key] = self._say(frames)
            except (AttributeError, KeyError, TypeError) as error:
                raise SnapshotError(
                    f"stack frames are not as torch 2.11 to 2.14 writes them ({error!r})"
                ) from error
        return self._known[key]

    @staticmethod
    def _say(frames: Sequence[Record]) -> str:
        if not frames:
            return "unknown"
        python = [f for f in frames if f["filename"].endswith(".py")]
        if not python:
            return str(frames[0]["name"])
        shown = python[:1]
        if "/torch/" in python[0]["filename"]:
            shown += [f for f in python if "/torch/" not in f["filename"]][:1]
        return " in ".join(
            f"{f['name']} ({f['filename'].rsplit('/', 1)[-1]}:{f['line']})" for f in shown
        )


def _check_history(history: Any) -> None:
    """Raises SnapshotError for the first entry that is none."""
    if not isinstance(history, list):
        raise SnapshotError("the history is no list")
    for number, entry in enumerate(history):
        action = entry.get("action") if isinstance(entry, dict) else None
        if not isinstance(action, str):
            raise SnapshotError(f"event {number}: it has no action")
        if action in (ALLOC, ASKED_FREE, DONE_FREE):
            for name in ("addr", "size", "stream"):
                if not isinstance(entry.get(name), int) or entry[name] < 0:
                    raise SnapshotError(f"event {number}: {name} is {entry.get(name)!r}")


def _say_window(window: Window, device: int, history: Sequence[Record]) -> str:
    return (
        f"events {window.start} to {window.stop} of {len(history)} of device {device}: {window.how}"
    )


def _say_faults(found: _History) -> Iterator[str]:
    if found.older:
        yield (
            f"{found.older} blocks are older than the history, which began later or was longer "
            "than its buffer"
        )
    if found.lost_frees:
        yield f"{found.lost_frees} frees are missing and were set before the address was used again"
    if found.late:
        yield f"{found.late} blocks lived on after their free: another stream still used them"
    if found.empty:
        yield f"{found.empty} requests of 0 bytes were left out"
    if found.unknown_at_end:
        yield (
            f"{found.unknown_at_end} blocks are alive at the end of the history and not in the "
            "state that was dumped"
        )
    for time in found.failures[:3]:
        yield f"a request failed for want of memory at event {time}"


def _say_settings(snapshot: Record) -> Iterator[str]:
    settings = snapshot.get("allocator_settings")
    if not isinstance(settings, dict):
        return
    words = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF")
    if words:
        yield f"allocator settings: {words}"
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(divisions.values()):
        yield "the allocator rounded sizes by roundup_power2_divisions; here they are as asked for"


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, text, lists and dictionaries need no name of a class, so none is looked up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"the pickle asks for {module}.{name}, and a memory snapshot holds plain values only. "
            "It was not loaded"
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Millions of small objects that stay: collecting garbage between them costs more than they."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
