"""MiniMalloc's CSV files: `id,lower,upper,size`, and `offset` in a solution.

Columns may come in any order; `upper` is exclusive. Columns of other names are skipped, but a
column that would change the problem (`alignment`, `gaps`) is refused unless it says nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from .atomic_file import whole_file
from .problem import LARGEST, Buffer, Problem, ProblemError, check_buffer

COLUMNS = ("id", "lower", "upper", "size")
_CHANGES_THE_PROBLEM = {"alignment": {"", "0", "1"}, "gaps": {""}, "hint": {"", "-1"}}
_INTEGER = re.compile(r"[+-]?[0-9]+")


def read_problem(path: Path, capacity: int | None = None) -> Problem:
    """Reads a problem; raises ProblemError with file and line for whatever is wrong with it."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            return Problem(_read_buffers(path, stream), capacity)
    except OSError as error:
        raise ProblemError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: this is not a text file ({error.reason})") from error
    except csv.Error as error:
        raise ProblemError(f"{path}: not a CSV file: {error}") from error
    except ProblemError as error:
        message = str(error)
        raise ProblemError(
            message if message.startswith(str(path)) else f"{path}: {message}"
        ) from error


def _read_buffers(path: Path, stream) -> tuple[Buffer, ...]:  # type: ignore[no-untyped-def]
    rows = csv.reader(stream, skipinitialspace=True)
    header = next(rows, None)
    if not header:
        raise ProblemError(f"{path}: the file is empty, its first line must name the columns")
    names = [name.strip() for name in header]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ProblemError(
            f"{path}: no column {', '.join(missing)}; the first line must name "
            f"{','.join(COLUMNS)} and it says {','.join(names)[:200]!r}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ProblemError(f"{path}: column {', '.join(twice)} occurs twice")
    at = {name: names.index(name) for name in COLUMNS}
    guarded = [(names.index(name), name) for name in _CHANGES_THE_PROBLEM if name in names]
    buffers = []
    first_line: dict[str, int] = {}
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        where = f"{path}, line {rows.line_num}"
        if len(row) != len(names):
            raise ProblemError(f"{where}: {len(row)} values for {len(names)} columns")
        for index, name in guarded:
            if row[index].strip() not in _CHANGES_THE_PROBLEM[name]:
                raise ProblemError(f"{where}: column {name} is not supported, remove it")
        name = row[at["id"]].strip()
        if not name:
            raise ProblemError(f"{where}: the id is missing")
        if name in first_line:
            raise ProblemError(f"{where}: id {name!r} was used in line {first_line[name]} already")
        first_line[name] = rows.line_num
        lower, upper, size = (_integer(row[at[c]], c, where) for c in ("lower", "upper", "size"))
        try:
            check_buffer(buffer := Buffer(name, lower, upper, size))
        except ProblemError as error:
            raise ProblemError(f"{where}: {error}") from error
        buffers.append(buffer)
    if not buffers:
        raise ProblemError(f"{path}: there are no buffers below the first line")
    return tuple(buffers)


def _integer(text: str, column: str, where: str) -> int:
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ProblemError(f"{where}: {column} must be an integer, not {text[:40]!r}")
    if len(text) > 20:  # int() of a very long number is slow, and refuses more than 4300 digits
        raise ProblemError(f"{where}: {column} {text[:20]}... is beyond {LARGEST} (2^53)")
    return int(text)


def write_solution(path: Path, problem: Problem, offsets: Sequence[int]) -> None:
    """Writes `id,lower,upper,size,offset`: the whole file appears at once or not at all."""
    with whole_file(path) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*COLUMNS, "offset"])
        for b, offset in zip(problem.buffers, offsets, strict=True):
            writer.writerow([b.id, b.lower, b.upper, b.size, offset])
