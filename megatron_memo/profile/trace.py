"""One iteration's requests for device memory, in order: what a plan is made from.

A trace comes from the profile on meta tensors, from the allocator's record mode, or from a memory
snapshot of PyTorch. Its file (``*.trace.jsonl``, also gzipped as ``*.trace.jsonl.gz``) holds one
JSON value a line:

    {"format": "megatron-memo trace", "version": 1, ...}   the header, see `Header`
    ["p", part, direction, micro_batch, layer, chunk, stage]   declares the next phase, from 0
    ["h", id, bytes, stream, what]         a block that is alive when the window begins
    ["e", phase]                           the process enters a phase
    ["m", id, bytes, stream, what]         a request; `what` is the operator or other origin
    ["f", id]                              the block is given back
    ["end", count]                         number of m, f and e lines: a cut file is noticed

Bytes are those asked for; `Header.rounding` says how the allocator rounds them up. An id names one
block for the whole trace and is never used again. A block without an ``f`` outlives the window.
Nothing here imports torch.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_memo.phases import FORWARD, LAYER, START, Phase

FORMAT, VERSION = "megatron-memo trace", 1
DEVICES = ("cuda", "cpu")
LARGEST_SIZE = 2**53  # what JSON readers and the solvers hold exactly


class TraceError(ValueError):
    """A trace is damaged or makes no sense. The message is one line for the user."""


class Malloc(NamedTuple):
    """A request of `size` bytes on `stream`, made by `what`."""

    id: int
    size: int
    stream: int
    what: str


class Free(NamedTuple):
    """The block is given back."""

    id: int


class Enter(NamedTuple):
    """The process enters `Trace.phases[phase]`."""

    phase: int


Event = Malloc | Free | Enter


@dataclass(frozen=True)
class Header:
    """What a trace is of.

    Attributes:
        source: "profile", "allocator" or "snapshot".
        device: "cuda" or "cpu": whose kernels and allocator the requests are for.
        rounding: bytes to a multiple of which that allocator rounds requests up.
        rank: the process, of `world_size`.
        iteration: which one was taken, from 1; None where the source does not tell.
        fingerprint: everything that decides the requests, by name; compared before a plan is used.
        same_ranks: ranks that make the same requests (themselves included).
        notes: what a reader should know (modelled workspaces, events left out).
        held_parts: bytes of the held blocks by what they are for ("weights", "gradients",
            "optimizer"), from a source that knows; what is missing from their sum is buffers.
        host_bytes: host memory that the rank swaps activations to.
    """

    source: str
    device: str = "cuda"
    rounding: int = 512
    rank: int = 0
    world_size: int = 1
    iteration: int | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    same_ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    held_parts: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0


class Life(Enum):
    """How long a block lives (MEMO, section 4.1)."""

    SKELETAL = "skeletal"  # from a layer's forward into a backward
    TRANSIENT = "transient"  # within one phase or a few
    PERSISTENT = "persistent"  # alive before or after the window: no plan can place it


@dataclass(frozen=True)
class Block:
    """One malloc and its free. Times are positions among the trace's events.

    Attributes:
        lower, upper: alive in [lower, upper); upper is None for a block that outlives the window.
        phase: the phase it was asked for in.
    """

    id: int
    size: int
    stream: int
    what: str
    phase: int
    lower: int
    upper: int | None
    life: Life


@dataclass(frozen=True)
class Trace:
    """A header, the phases that occur, blocks alive at the start, and the events in order.

    Raises TraceError when events contradict each other: see `check`.
    """

    header: Header
    phases: tuple[Phase, ...]
    events: tuple[Event, ...]
    held: tuple[Malloc, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    def blocks(self) -> list[Block]:
        """Every request of the window, in order."""
        ends: dict[int, tuple[int, int]] = {}
        phase = 0
        for time, event in enumerate(self.events):
            if isinstance(event, Enter):
                phase = event.phase
            elif isinstance(event, Free):
                ends[event.id] = time, phase
        found, phase = [], 0
        for time, event in enumerate(self.events):
            if isinstance(event, Enter):
                phase = event.phase
            elif isinstance(event, Malloc):
                end = ends.get(event.id)
                life = self._life(phase, end)
                upper = None if end is None else end[0]
                found.append(Block(*event, phase, time, upper, life))
        return found

    def _life(self, born: int, end: tuple[int, int] | None) -> Life:
        if end is None:
            return Life.PERSISTENT
        first, last = self.phases[born], self.phases[end[1]]
        inside = first.part == LAYER and first.direction == FORWARD
        if inside and last.direction and last.direction != FORWARD:
            return Life.SKELETAL
        return Life.TRANSIENT

    def peak(self) -> int:
        """Most bytes of the window's own requests alive at once, rounded as the allocator does."""
        alive = most = 0
        sizes: dict[int, int] = {}
        for event in self.events:
            if isinstance(event, Malloc):
                sizes[event.id] = rounded(event.size, self.header.rounding)
                alive += sizes[event.id]
                most = max(most, alive)
            elif isinstance(event, Free):
                alive -= sizes.pop(event.id, 0)
        return most


def rounded(size: int, rounding: int) -> int:
    """`size` bytes as the allocator counts them."""
    return -(-size // rounding) * rounding


def check(trace: Trace) -> None:
    """Raises TraceError for the first thing that cannot be.

    That is: no request at all, a size that is no size, a free before its malloc, a second free, an
    id used twice, a phase that is not declared.
    """
    seen: dict[int, bool] = {}  # id -> given back
    _check_header(trace.header)
    for block in trace.held:
        _check_new(block, "held block", seen)
    if not trace.phases or trace.phases[0] != START:
        raise TraceError(f"the first phase must be '{START}', in which a window begins")
    requests = 0
    for time, event in enumerate(trace.events):
        if isinstance(event, Malloc):
            _check_new(event, f"event {time}", seen)
            requests += 1
        elif isinstance(event, Free):
            if event.id not in seen:
                raise TraceError(f"event {time}: free of block {event.id} before its malloc")
            if seen[event.id]:
                raise TraceError(f"event {time}: block {event.id} is given back twice")
            seen[event.id] = True
        elif not 0 <= event.phase < len(trace.phases):
            raise TraceError(f"event {time}: phase {event.phase} is not declared")
    if not requests:
        raise TraceError("the trace is empty: it has no request for memory")


def _check_header(header: Header) -> None:
    if header.rounding < 1:
        raise TraceError(f"rounding {header.rounding} makes no sense, it is at least 1")
    if header.device not in DEVICES:
        raise TraceError(f"device {header.device!r} is none of {', '.join(DEVICES)}")
    if header.rank < 0 or header.world_size < 1:
        raise TraceError(f"rank {header.rank} of {header.world_size} ranks makes no sense")


def _check_new(request: Malloc, where: str, seen: dict[int, bool]) -> None:
    if not 0 < request.size <= LARGEST_SIZE:
        raise TraceError(
            f"{where}: block {request.id} of {request.size} bytes, it must be from 1 to 2^53"
        )
    if request.id in seen:
        raise TraceError(f"{where}: block id {request.id} is used twice")
    seen[request.id] = False


# ---- files


def write_trace(path: Path, trace: Trace) -> None:
    """Writes the file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        with _open(part, "wt", zipped=path.suffix == ".gz") as file:
            for line in _lines(trace):
                file.write(json.dumps(line, separators=(",", ":")))
                file.write("\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _lines(trace: Trace) -> Iterator[Any]:
    yield {"format": FORMAT, "version": VERSION, **asdict(trace.header)}
    for phase in trace.phases:
        yield ["p", *phase]
    for block in trace.held:
        yield ["h", *block]
    for event in trace.events:
        if isinstance(event, Malloc):
            yield ["m", *event]
        elif isinstance(event, Free):
            yield ["f", event.id]
        else:
            yield ["e", event.phase]
    yield ["end", len(trace.events)]


def read_trace(path: Path) -> Trace:
    """Reads and checks a trace file.

    Raises:
        TraceError: not there, not a trace, of another version, cut, or contradicting itself; the
            message names the file and the line.
    """
    try:
        with _open(path, "rt", zipped=path.suffix == ".gz") as file:
            return _read(file)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: {reason}") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path}: this is no text file, and no trace") from None


def _read(file: IO[str]) -> Trace:
    header = _header(file.readline())
    phases: list[Phase] = []
    held: list[Malloc] = []
    events: list[Event] = []
    ended = False
    for number, text in enumerate(file, start=2):
        if ended:
            raise TraceError(f"line {number}: there is something after the end line")
        try:
            kind, *rest = json.loads(text)
            if kind == "m":
                events.append(_request(rest))
            elif kind == "f":
                events.append(Free(_whole(*rest)))
            elif kind == "e":
                events.append(Enter(_whole(*rest)))
            elif kind == "p":
                phases.append(phase_of(rest))
            elif kind == "h":
                held.append(_request(rest))
            elif kind == "end":
                if rest != [len(events)]:
                    raise TraceError(f"line {number}: {rest} events announced, {len(events)} read")
                ended = True
            else:
                raise TraceError(f"line {number}: {kind!r} is no kind of line of a trace")
        except TraceError:
            raise
        except (ValueError, TypeError, RecursionError):
            shown = text.strip()[:60]
            raise TraceError(f"line {number}: {shown!r} is no line of a trace") from None
    if not ended:
        raise TraceError("the file is cut off: its last line is missing")
    return Trace(header, tuple(phases), tuple(events), tuple(held))


def _header(text: str) -> Header:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise TraceError("this is no trace: the first line is not the header of one")
    version = fields.pop("version", None)
    if version != VERSION:
        raise TraceError(f"version {version} of the format, this program reads {VERSION}")
    try:
        for name in ("same_ranks", "notes"):
            fields[name] = tuple(fields.get(name, ()))
        header = Header(**fields)
        numbers = (header.rounding, header.rank, header.world_size, header.host_bytes)
        for number in (*numbers, *header.same_ranks, *header.held_parts.values()):
            _whole(number)
        if header.iteration is not None:
            _whole(header.iteration)
        for words in (header.source, header.device, *header.notes):
            if not isinstance(words, str):
                raise ValueError(f"{words!r} is no text")
        if not isinstance(header.fingerprint, dict):
            raise ValueError(f"{header.fingerprint!r} is no fingerprint")
        return header
    except (AttributeError, TypeError, ValueError) as error:
        raise TraceError(f"line 1: the header does not fit: {error}") from None


def _request(rest: list[Any]) -> Malloc:
    identity, size, stream, what = rest
    return Malloc(_whole(identity), _whole(size), _whole(stream), str(what))


def phase_of(rest: list[Any]) -> Phase:
    """A phase from the fields of its line in a file. Raises ValueError where they are none."""
    part, direction, *numbers = rest
    if len(numbers) != 4 or not isinstance(part, str) or not isinstance(direction, str):
        raise ValueError("a phase has two words and four numbers")
    return Phase(part, direction, *(n if n is None else _whole(n) for n in numbers))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return value


def _open(path: Path, mode: str, *, zipped: bool) -> IO[str]:
    if zipped:
        packed: Any = gzip.open(path, mode, 3, encoding="utf-8")  # noqa: SIM115 (callers close)
        return packed
    return open(path, mode, encoding="utf-8")
