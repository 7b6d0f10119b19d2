"""Which files are read, and in which order."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One file to read.

    ``name`` is what messages call it: the path below the folder it was found in, or as given.
    ``size`` (bytes) and ``mtime_ns`` tell a file that changed between two runs.
    """

    path: str
    name: str
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        """Whether every line is a JSON object with one text, rather than the file one text."""
        return self.path.endswith(".jsonl")


def find_sources(
    inputs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    excludes: Sequence[str] = (),
    output_prefix: str | None = None,
) -> list[Source]:
    """The files that ``inputs`` name, each once.

    Files and folders are taken in the order given; inside a folder files come sorted by the parts
    of their path, so that files of one folder stay together whatever the file system's own order.
    Hidden files and folders are left out, as are links to folders (they may form circles).

    Args:
        inputs: files and folders. A file named here is read whatever its suffix.
        suffixes: file name endings (".py") that files inside folders must have; none: all files.
        excludes: shell patterns; a file is left out if one matches its path below the folder, one
            of the folders on that path, or its name.
        output_prefix: files that begin with this and a dot are the output of a run, not input.

    Raises:
        ValueError: an input does not exist, or nothing is left to read.
    """
    found: dict[str, Source] = {}
    for given in inputs:
        root = Path(given)
        if not root.exists():
            raise ValueError(
                f"--input {given} does not exist. Name a text file, a .jsonl file or a folder of "
                "such files; several may be given."
            )
        for path, name in _walk(root, suffixes, excludes) if root.is_dir() else [(root, given)]:
            absolute = os.path.realpath(path)
            if output_prefix is not None and absolute.startswith(
                os.path.realpath(output_prefix) + "."
            ):
                continue
            if not os.path.isfile(absolute):
                continue
            stat = os.stat(absolute)
            found.setdefault(absolute, Source(absolute, name, stat.st_size, stat.st_mtime_ns))
    if not found:
        raise ValueError(_nothing_found(inputs, suffixes, excludes))
    return list(found.values())


def _walk(
    root: Path, suffixes: Sequence[str], excludes: Sequence[str]
) -> Iterator[tuple[Path, str]]:
    """Files below ``root`` that pass the filters, in order, with their path below it."""
    for folder, folders, files in os.walk(root):
        below = Path(folder).relative_to(root)
        # In place and sorted: os.walk goes on into what is left, in this order.
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not _excluded(below / name, excludes)
        )
        for name in sorted(files):
            relative = below / name
            if name[0] == "." or _excluded(relative, excludes):
                continue
            if suffixes and not name.endswith(tuple(suffixes)):
                continue
            yield root / relative, relative.as_posix()


def _excluded(relative: Path, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path below the folder, or the last name on it."""
    return any(
        fnmatch.fnmatchcase(relative.as_posix(), pattern)
        or fnmatch.fnmatchcase(relative.name, pattern)
        for pattern in patterns
    )


def _nothing_found(inputs: Sequence[str], suffixes: Sequence[str], excludes: Sequence[str]) -> str:
    filters = "".join(f" --suffix {suffix}" for suffix in suffixes)
    filters += "".join(f" --exclude {pattern}" for pattern in excludes)
    return (
        f"--input {' '.join(inputs)} holds no file to read"
        + (f" with{filters}; loosen these filters" if filters else "")
        + ". Hidden files and folders are not read; a file named itself is."
    )
