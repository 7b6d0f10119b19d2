"""Estimates as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_memo.config import DEFAULT_RESIDENT_LAYERS
from megatron_memo.estimate import flops
from megatron_memo.estimate.answer import Answer
from megatron_memo.estimate.hardware import Machine
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Parts
from megatron_memo.estimate.strategies import Memo
from megatron_memo.sizes import size_words

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows) -> str:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def side_by_side(answers: Sequence[Answer], own: Answer, device_memory: int) -> str:
    """One column a way, `own` marked with a star."""
    rows = [["", *(f"{one.name}{' *' if one is own else ''}" for one in answers)]]
    for part in Parts().by_name():
        rows.append([f"  {part}", *(_gib(one.peak.parts.by_name()[part]) for one in answers)])
    rows.append(["GPU, GiB", *(_gib(one.peak.parts.total) for one in answers)])
    rows.append(["  of memory", *(_share(one, device_memory) for one in answers)])
    rows.append(["host of a GPU, GiB", *(_gib(one.host_bytes) for one in answers)])
    if any(one.result.disk_peak for one in answers):
        rows.append(["disk of a GPU, GiB", *(_gib(one.result.disk_peak) for one in answers)])
    rows.append(["step", *(seconds_words(one.result.seconds) for one in answers)])
    rows.append(["tokens/s", *(f"{one.result.tokens_per_second:.0f}" for one in answers)])
    rows.append(["MFU full", *(f"{one.result.mfu_full:.1%}" for one in answers)])
    rows.append(["MFU causal", *(f"{one.result.mfu_causal:.1%}" for one in answers)])
    rows.append(["waits for copies", *(_waits(one) for one in answers)])
    rows.append(["fits", *("yes" if one.fits else "no" for one in answers)])
    return aligned(rows)


def notes(
    answers: Sequence[Answer], own: Answer, job: Job, reserve: int, machine: Machine
) -> list[str]:
    """What the table does not say by itself, a line each."""
    how = "by profile" if own.profiled else "by arithmetic"
    others = "" if len(answers) == 1 else ", the others by arithmetic" if own.profiled else ""
    lines = [
        f"* these flags, {how}{others}; most in {own.peak.where}",
        f"{size_words(reserve)} of each GPU are kept for CUDA, NCCL and fragmentation (--reserve)"
        f", {size_words(machine.host_free)} of a node's host memory to others (--memo-host-budget)",
        flops.MFU_FORMULA,
    ]
    lines += [f"{one.name}: {'; '.join(one.problems)}" for one in answers if not one.fits]
    if job.experts is not None:
        lines.append(
            "experts are taken to get as many tokens each; a rank that gets more needs more"
        )
    memo = next((one.strategy for one in answers if isinstance(one.strategy, Memo)), None)
    if memo is not None and memo is not own.strategy and memo.resident != DEFAULT_RESIDENT_LAYERS:
        lines.append(
            f"{memo.name} is with --memo-resident-layers {memo.resident}"
            + (f" --memo-chunks {memo.chunks}" if memo.chunks else "")
            + ": with its defaults it would not fit"
        )
    return lines


def way_words(one: Answer) -> str:
    """The way's name, and what it had to give up of memo's defaults to fit."""
    way = one.strategy
    if not isinstance(way, Memo) or way.resident == DEFAULT_RESIDENT_LAYERS:
        return one.name
    return f"{one.name}, resident {way.resident}"


def seconds_words(seconds: float) -> str:
    """As in `1.24 s`, `12 ms`."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def tokens_words(tokens: int) -> str:
    """As in `128K`: K is 1024, M 1024K."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "-"


def _share(one: Answer, memory: int) -> str:
    return f"{one.peak.parts.total / memory:.0%}"


def _waits(one: Answer) -> str:
    exposed = one.result.exposed
    names = ("D2H", "H2D", "disk write", "disk read")
    return f"{sum(exposed.get(name, 0.0) for name in names) / one.result.seconds:.1%}"
