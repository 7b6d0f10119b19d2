"""Plans: where in one arena each request of an iteration goes; and their files.

A plan file (``*.plan.jsonl``) holds one JSON value a line:

    {"format": "megatron-memo plan", "version": 1, ...}     see `Plan`
    ["w", {...}]                                            a window begins, see `Window`
    ["p", part, direction, micro_batch, layer, chunk, stage]    its next phase, from 0
    ["r", phase, bytes, stream, offset, lower, upper]       its next request, see `Entry`
    ["end", lines, sha256]                                  lines before this one, and their digest

Every plan is verified before it is written and again when it is loaded; a file that was cut or
edited, that is no plan or of another version, is refused. Nothing here imports torch or a solver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron_memo.phases import Phase
from megatron_memo.profile.trace import phase_of

from .atomic_file import whole_file

FORMAT, VERSION = "megatron-memo plan", 1


class PlanError(ValueError):
    """A plan can't be used. The message is one line for the user."""


class Entry(NamedTuple):
    """One request and the place it gets.

    Attributes:
        phase: index into the window's phases.
        size: bytes asked for, before rounding.
        stream: it is made on.
        offset: bytes from the arena's beginning; None where the native allocator serves it.
        lower, upper: alive in [lower, upper), in events of the trace; upper is None for a block
            that outlives the window.
    """

    phase: int
    size: int
    stream: int
    offset: int | None
    lower: int
    upper: int | None


@dataclass(frozen=True)
class Window:
    """The requests of one kind of iteration, in order. Windows never run at the same time.

    Attributes:
        source: name of the trace file, and `sha256` the digest of its bytes.
        fingerprint: what decides the requests, as in the trace.
        iteration: which one the trace is of; None if unknown.
        stream: the only one with planned requests.
    """

    source: str
    sha256: str
    fingerprint: dict[str, Any]
    iteration: int | None
    stream: int
    phases: tuple[Phase, ...] = ()
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One arena for all windows.

    Attributes:
        device: "cuda" or "cpu"; rank, world_size, same_ranks: whose it is.
        rounding: bytes to a multiple of which sizes are rounded up; offsets are multiples of it.
        smallest: a request that is smaller when rounded is not planned.
        arena: bytes that the plan needs.
        bound: proven: no layout of these requests needs less. `bound_by` says by what proof.
        found_by: which solver found the layout of the window that needs most.
        made_by: program and version.
    """

    device: str
    rank: int
    world_size: int
    same_ranks: tuple[int, ...]
    rounding: int
    smallest: int
    arena: int
    bound: int
    bound_by: str
    found_by: str
    made_by: str
    windows: tuple[Window, ...] = ()

    @property
    def gap(self) -> int:
        """Bytes above the proven bound; 0 means optimal."""
        return self.arena - self.bound


def write_plan(path: Path, plan: Plan) -> None:
    """Verifies the plan and writes it, whole or not at all.

    Raises:
        PlanError: the plan is wrong, or the file can't be written.
    """
    from .verify_plan import verify_plan

    verify_plan(plan)
    digest, count = hashlib.sha256(), 0
    try:
        with whole_file(path) as stream:
            for line in _lines(plan):
                text = json.dumps(line, separators=(",", ":")) + "\n"
                stream.write(text)
                digest.update(text.encode())
                count += 1
            stream.write(json.dumps(["end", count, digest.hexdigest()]) + "\n")
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error


def _lines(plan: Plan) -> Iterator[Any]:
    yield {"format": FORMAT, "version": VERSION, **_plain(plan, "windows")}
    for window in plan.windows:
        yield ["w", _plain(window, "phases", "entries")]
        for phase in window.phases:
            yield ["p", *phase]
        for entry in window.entries:
            yield ["r", *entry]


def _plain(item: Plan | Window, *without: str) -> dict[str, Any]:
    return {f.name: getattr(item, f.name) for f in fields(item) if f.name not in without}


def load_plan(path: Path) -> Plan:
    """Reads a plan and verifies it.

    Raises:
        PlanError: not there, damaged, foreign, of another version, or wrong; the message names the
            file and the reason.
    """
    from .verify_plan import verify_plan

    plan = read_plan(path)
    try:
        verify_plan(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan


def read_plan(path: Path) -> Plan:
    """As `load_plan`, without the verification: for what verifies by itself."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error
    try:
        return _parse(data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _parse(data: bytes) -> Plan:
    lines = data.splitlines(keepends=True)
    header = _header(lines[0] if lines else b"")
    _check_end(lines)
    windows: list[Window] = []
    phases: list[Phase] = []
    entries: list[Entry] = []
    opened: dict[str, Any] | None = None

    def close() -> None:
        if opened is not None:
            windows.append(Window(**opened, phases=tuple(phases), entries=tuple(entries)))
            phases.clear()
            entries.clear()

    for number, line in enumerate(lines[1:-1], start=2):
        try:
            kind, *rest = json.loads(line)
            if kind == "r" and opened is not None:
                entries.append(_entry(rest, len(phases)))
            elif kind == "p" and opened is not None:
                phases.append(phase_of(rest))
            elif kind == "w":
                close()
                (opened,) = rest
            else:
                raise ValueError(f"{kind!r} is out of place")
        except (ValueError, TypeError) as error:
            raise PlanError(f"line {number} is no line of a plan: {error}") from None
    try:
        close()
        header["same_ranks"] = tuple(header["same_ranks"])
        plan = Plan(**header, windows=tuple(windows))
        _check_types(plan)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"a header does not fit: {error}") from None
    return plan


def _header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise PlanError("this is no plan: the first line is not the header of one")
    version = header.pop("version", None)
    if version != VERSION:
        raise PlanError(
            f"version {version} of the format, this program reads {VERSION}; make the plan again "
            "with this program, or use the one that made it"
        )
    return header


def _check_end(lines: list[bytes]) -> None:
    try:
        kind, count, digest = json.loads(lines[-1])
        if kind != "end" or not lines[-1].endswith(b"\n"):
            raise ValueError("not the end")
    except (ValueError, TypeError):
        raise PlanError("the file is cut off: its last line is missing") from None
    if count != len(lines) - 1:
        raise PlanError(f"damaged: {len(lines) - 1} lines where {count} were written")
    if hashlib.sha256(b"".join(lines[:-1])).hexdigest() != digest:
        raise PlanError("damaged or edited: its digest is not the one it was written with")


def _entry(rest: list[Any], phases: int) -> Entry:
    entry = Entry(*rest)
    for name, value in zip(Entry._fields, entry, strict=True):
        optional = value is None and name in ("offset", "upper")
        if not optional and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} is {value!r}, no whole number")
    if not 0 <= entry.phase < phases:
        raise ValueError(f"phase {entry.phase} is not declared")
    return entry


def _check_types(plan: Plan) -> None:
    for name in ("rank", "world_size", "rounding", "smallest", "arena", "bound"):
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}, no whole number")
    if plan.rounding < 1:
        raise ValueError(f"rounding is {plan.rounding}, it must be at least 1")
    for window in plan.windows:
        if not isinstance(window.fingerprint, dict):
            raise ValueError("a fingerprint is no table of names and values")


def digest_of(path: Path) -> str:
    """sha256 of a file's bytes, as in `Window.sha256`. Raises PlanError."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error
