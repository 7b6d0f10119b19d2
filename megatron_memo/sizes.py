"""Bytes in words: what people type into a flag, and what a log line says."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "512 MiB", "2TB" or "1073741824".

    Raises:
        ValueError: it is none, or not above 0; the message is the end of a sentence.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("must be a size such as 80GiB, 512MiB or 1073741824")
    nbytes = round(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if nbytes < 1:
        raise ValueError("must be at least one byte")
    return nbytes


def size_words(nbytes: float) -> str:
    """As in `1.5 GiB`, `12 MiB`, `700 B`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 2 ** (10 * power):
            return f"{nbytes / 2 ** (10 * power):.4g} {unit}"
    return f"{nbytes:.0f} B"
