"""What a dataset was made from, and what is in it: ``PREFIX.json``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_memo.data.options import BuildOptions
from megatron_memo.data.parts import Skip
from megatron_memo.data.sources import Source

# Part of every fingerprint: raise it when the same input would give other bytes.
_FORMAT = 1


@dataclass
class Summary:
    """What was made; stored beside the dataset as ``PREFIX.json``.

    ``plan`` is the fingerprint of input and settings, ``lengths`` in tokens with the end of the
    document, ``dropped`` counts documents below ``min_document_tokens``.
    """

    plan: str
    flags: list[str]
    documents: int = 0
    tokens: int = 0
    longest: int = 0
    shortest: int = 0
    dropped: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[Skip] = field(default_factory=list)
    bin_bytes: int = 0


def fingerprint(sources: Sequence[Source], options: BuildOptions) -> str:
    """A hash of all that decides the result: files (path, size, time) and settings."""
    tokenizer_files = [
        (value, *_size_and_time(value))
        for value in options.tokenizer.values.values()
        if isinstance(value, str) and os.path.exists(value)
    ]
    parts = [
        _FORMAT,
        [asdict(source) for source in sources],
        options.tokenizer.flags,
        tokenizer_files,
        asdict(options.read),
        options.document_tokens,
        options.min_document_tokens,
        options.part_bytes,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def up_to_date(plan: str, prefix: str) -> Summary | None:
    """The summary of the dataset at ``prefix`` if it is whole and was made by this very plan."""
    try:
        raw = json.loads(Path(prefix + ".json").read_text())
        whole = (
            raw["plan"] == plan
            and Path(prefix + ".idx").is_file()
            and Path(prefix + ".bin").stat().st_size == raw["bin_bytes"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        # No such file, or a file of that name that is not ours: not up to date either way.
        return None
    if not whole:
        return None
    raw["examples"] = [Skip(**example) for example in raw["examples"]]
    return Summary(**raw)


def _size_and_time(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns
