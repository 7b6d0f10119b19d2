"""The work cut into parts, and the pieces of text in one part.

A part is what one worker does in one go and what a restart does again. Parts are cut from the
sizes of the files alone, so they do not depend on the number of workers. Text files stay whole; a
.jsonl file is cut into byte ranges, and a line belongs to the range in which it starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_memo.data.sources import Source

BadEncoding = Literal["skip", "replace", "stop"]

# Encodings in which a zero byte is an ordinary part of text.
_WIDE_ENCODINGS = ("utf-16", "utf-32", "utf16", "utf32", "u16", "u32")


@dataclass(frozen=True)
class Unit:
    """Bytes ``start`` to ``end`` of the source at ``index``; a text file's unit is all of it."""

    index: int
    start: int
    end: int


@dataclass(frozen=True)
class Skip:
    """A piece that gave no tokens, or not the tokens it should: where it is, and why."""

    where: str
    why: Literal["binary", "encoding", "empty", "json", "replaced"]
    detail: str = ""


@dataclass(frozen=True)
class ReadOptions:
    """How bytes become text.

    ``bad_encoding`` says what happens to a piece that ``encoding`` can not decode: it is skipped,
    or read with U+FFFD in place of what is wrong, or the run stops. The first two are counted and
    named. ``text_key`` is the key of the text in a line of a .jsonl file.
    """

    encoding: str = "utf-8"
    bad_encoding: BadEncoding = "skip"
    text_key: str = "text"


def cut(sources: Sequence[Source], part_bytes: int) -> list[list[Unit]]:
    """Parts of about ``part_bytes`` each, in the order of the sources; a text file is not cut."""
    units = []
    for index, source in enumerate(sources):
        step = part_bytes if source.is_jsonl else max(source.size, 1)
        for start in range(0, max(source.size, 1), step):
            units.append(Unit(index, start, min(start + step, source.size)))
    parts: list[list[Unit]] = [[]]
    room = part_bytes
    for unit in units:
        size = unit.end - unit.start
        if parts[-1] and size > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(unit)
        room -= size
    return parts


def read_pieces(source: Source, unit: Unit, options: ReadOptions) -> Iterator[str | Skip]:
    """The texts of a unit in order, with a ``Skip`` where there is something to report.

    Raises:
        ValueError: a piece can not be decoded and ``options.bad_encoding`` is "stop".
        OSError: the file can not be read, as when it vanished after the run began.
    """
    if source.is_jsonl:
        for offset, line in _lines(source.path, unit):
            if line.strip():
                yield from _from_json(line, f"{source.name} at byte {offset}", options)
        return
    with open(source.path, "rb") as file:
        yield from _from_bytes(file.read(), source.name, options)


def _lines(path: str, unit: Unit) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of every line that starts inside the unit."""
    with open(path, "rb") as file:
        offset = unit.start
        if offset:
            # The byte before tells whether a line starts here; if not, its rest is not ours.
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < unit.end:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def _from_bytes(data: bytes, where: str, options: ReadOptions) -> Iterator[str | Skip]:
    if not data:
        yield Skip(where, "empty")
        return
    if b"\0" in data and not options.encoding.lower().startswith(_WIDE_ENCODINGS):
        yield Skip(where, "binary", "it holds a zero byte")
        return
    try:
        yield data.decode(options.encoding)
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not {options.encoding} ({error.reason})"
        if options.bad_encoding == "stop":
            raise ValueError(
                f"{where}: {detail}. Give its --encoding, or let --bad-encoding skip it or "
                "replace what is wrong."
            ) from error
        if options.bad_encoding == "skip":
            yield Skip(where, "encoding", detail)
            return
        yield Skip(where, "replaced", detail)
        yield data.decode(options.encoding, errors="replace")


def _from_json(line: bytes, where: str, options: ReadOptions) -> Iterator[str | Skip]:
    try:
        record = json.loads(line)
    except ValueError as error:
        yield Skip(where, "json", f"not JSON ({error})")
        return
    text = record.get(options.text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        yield Skip(where, "json", f'no text under the key "{options.text_key}"')
    elif not text:
        yield Skip(where, "empty")
    else:
        # JSON can spell half a surrogate pair, which no text encoding can hold.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        if clean != text:
            yield Skip(where, "replaced", "half a surrogate pair")
        yield clean
