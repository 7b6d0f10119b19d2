"""Numbers on axes: round ones, in the unit that suits what is visible."""

from __future__ import annotations

import math

from megatron_memo.estimate.table import tokens_words
from megatron_memo.plot.figure import Axis, Unit

_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def scale(axis: Axis, low: float, high: float) -> tuple[str, float]:
    """The unit for numbers between, and how many of the axis's own it has."""
    if axis.log:
        high = low
    table = {Unit.BYTES: _BYTES, Unit.SECONDS: _SECONDS, Unit.SHARE: (("%", 0.01),)}
    for name, size in table.get(axis.unit, ()):
        if high >= size or size == table[axis.unit][-1][1]:
            return name, size
    return "", 1.0


def label(axis: Axis, unit: str) -> str:
    """The axis's label with the unit of its ticks."""
    return f"{axis.label} ({unit})" if unit else axis.label


def round_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie between, at most so many."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def doublings(low: float, high: float) -> list[float]:
    """Powers of two between."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    return [2.0**k for k in range(first, last + 1)]


def written(axis: Axis, value: float, size: float) -> str:
    """A tick's text, without its unit; `size` is that of `scale`."""
    if axis.unit is Unit.TOKENS:
        return tokens_words(round(value))
    if axis.unit is Unit.COUNT:
        return f"{round(value):,}"
    return f"{value / size:.6g}"
