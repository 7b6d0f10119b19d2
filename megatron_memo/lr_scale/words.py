"""Batches, pairs and numbers as people write them, and batches as people read them."""

from __future__ import annotations

import math
import re

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIX |= {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)}
_COUNT = r"(\d+(?:\.\d+)?)([kmgt]i?)?"
_BATCH = re.compile(f"{_COUNT}(?:x{_COUNT})?", re.IGNORECASE)


def parse_tokens(flag: str, text: str) -> float:
    """Tokens of "4194304", "4M", "4Mi" or "128x32Ki" (sequences x tokens of each).

    Raises:
        ValueError: it is none of these; the message begins with `flag` and `text`.
    """
    found = _BATCH.fullmatch(text.strip())
    if found is not None:
        first = float(found[1]) * _PREFIX[(found[2] or "").lower()]
        second = float(found[3] or 1) * _PREFIX[(found[4] or "").lower()]
        if first * second >= 1:
            return first * second
    raise ValueError(
        f"{flag} {text}: must be a number of tokens, such as 4194304, 4M, 4Mi, or 128x32Ki "
        "(sequences x tokens of each)."
    )


def parse_rate(text: str) -> tuple[float, float]:
    """(batch in tokens, learning rate) of `--rate`. Raises ValueError."""
    batch, rate = _halves("--rate", text, "BATCH:LR, such as 4M:3e-4")
    value = parse_number(f"--rate {text}: the learning rate", rate, above=0.0)
    return parse_tokens(f"--rate {text}: the batch", batch), value


def parse_run(text: str) -> tuple[float, float]:
    """(steps, tokens) of `--run`. Raises ValueError."""
    steps, tokens = _halves("--run", text, "STEPS:TOKENS, such as 40000:20G")
    value = parse_number(f"--run {text}: the number of steps", steps, above=0.0)
    return value, parse_tokens(f"--run {text}: the tokens", tokens)


def parse_number(flag: str, text: str, above: float) -> float:
    """A finite number greater than `above`. Raises ValueError, beginning with `flag`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value < math.inf:
        raise ValueError(f"{flag} {text}: must be a number above {above:g}.")
    return value


def parse_whole(flag: str, text: str) -> int:
    """A whole number from 1. Raises ValueError, beginning with `flag`."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{flag} {text}: must be a whole number, 1 or more.")
    return int(text)


def tokens_words(count: float) -> str:
    """ "4Mi" for exactly that, else three digits and a decimal prefix."""
    for prefix in ("Ti", "Gi", "Mi", "Ki"):
        size = _PREFIX[prefix.lower()]
        if count >= size and count % size == 0 and count % 1000:
            return f"{int(count // size)}{prefix}"
    for prefix in ("T", "G", "M", "k"):
        size = _PREFIX[prefix.lower()]
        if count >= size:
            return f"{count / size:.3g}{prefix}"
    return f"{count:.3g}"


def _halves(flag: str, text: str, form: str) -> tuple[str, str]:
    left, colon, right = text.partition(":")
    if not colon:
        raise ValueError(f"{flag} {text}: must be {form}.")
    return left, right
