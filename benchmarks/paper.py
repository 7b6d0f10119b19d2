#!/usr/bin/env python3
"""The MEMO paper's published numbers against what the estimate says, row by row.

    python benchmarks/paper.py [--csv benchmarks/results/paper.csv]

The column `paper` holds what is published (arXiv 2407.12117: v3, and v1 for longest contexts and
the 65B model) or follows from the paper's own program; it is read from megatron_memo/estimate/
paper.py. Everything else is computed here, in a few seconds, and nothing of it was measured on a
GPU. Rows marked "calibrated" are what the cost model's efficiencies were chosen to meet
(megatron_memo/estimate/calibration.py); all others are predictions. MFU counts attention as half of
s^2, as Megatron does. Rows without a number of the paper's are what our own policies get.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_memo.estimate import memory, paper
from megatron_memo.estimate.answer import (
    DEFAULT_RESERVE,
    answer,
    peak_by_arithmetic,
    problems_of,
)
from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Peak
from megatron_memo.estimate.strategies import FullRecompute, PaperMemo, Stock, paper_alpha
from megatron_memo.estimate.timeline import simulate
from megatron_memo.estimate.ways import best_memo

COLUMNS = ("what", "unit", "paper", "estimate", "bound", "met", "remark")
K = paper.K
STEP, MOST = 64 * K, 8192 * K  # of longest contexts
POINTS = 0.03  # of MFU
LONGER = 1408 * K  # tokens of the 65B row


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        published: the paper's number; None for rows about ours.
        estimate: None where the estimate says that it does not work at all.
        low, high: where the estimate should lie; None for rows about ours.
    """

    what: str
    unit: str
    published: float | None
    estimate: float | None
    low: float | None = None
    high: float | None = None
    remark: str = ""

    def cells(self) -> list[str]:
        bound = "" if self.low is None else f"{_short(self.low)} to {_short(self.high)}"
        met = ""
        if self.low is not None:
            inside = self.estimate is not None and self.low <= self.estimate <= (self.high or 0)
            met = "yes" if inside else "NO"
        told = "none" if self.estimate is None else _short(self.estimate)
        published = "" if self.published is None else _short(self.published)
        return [self.what, self.unit, published, told, bound, met, self.remark]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    table = [COLUMNS, *(row.cells() for row in rows())]
    widths = [max(len(line[k]) for line in table) for k in range(len(COLUMNS) - 1)]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), end=""
        )
        print(f"  {line[-1]}".rstrip())
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            file.write("# python benchmarks/paper.py --csv benchmarks/results/paper.csv\n")
            file.write("# computed; nothing here was measured on a GPU\n")
            csv.writer(file).writerows(table)
    return 0


def rows() -> Iterator[Row]:
    """All of the table."""
    yield from _speed()
    yield from _alphas()
    yield from _longest()
    yield from _ours()


def _speed() -> Iterator[Row]:
    known = Calibration()
    hides, dominates = paper.SWAP_HIDES_FROM, paper.ATTENTION_SHARE_FROM
    yield Row(
        "full swap hides from, 7B, 8 GPUs", "K tokens", hides / K,
        paper.swap_hides_from(known) / K, 0.8 * hides / K, 1.2 * hides / K, "calibrated",
    )  # fmt: skip
    yield Row(
        "attention above 90% of forward from, 7B, 8 GPUs", "K tokens", dominates / K,
        paper.attention_dominates_from(known) / K, 0.9 * dominates / K, 1.1 * dominates / K,
        "calibrated",
    )  # fmt: skip
    seven, large = _costs("7B", K * K), _costs("65B", LONGER, cp=8)
    for what, published, costs in (
        ("7B at 1024K, 8 GPUs, paper's policy", paper.MFU_7B_AT_1M, seven),
        ("65B at 1408K, 64 GPUs (tp 8, cp 8), paper's policy", paper.MFU_65B_AT_1408K, large),
    ):
        mfu = simulate(costs, PaperMemo()).mfu_causal
        low, high = 100 * (published - POINTS), 100 * (published + POINTS)
        yield Row(f"MFU, {what}", "%", 100 * published, 100 * mfu, low, high, "predicted")


def _alphas() -> Iterator[Row]:
    for host, alpha in paper.ALPHA_BY_HOST_GIB.items():
        costs = _costs("7B", K * K, host_gib=host)
        what = f"alpha, 7B at 1024K, {host} GiB of host memory a node"
        yield Row(what, "", alpha, paper_alpha(costs), alpha - 0.001, alpha + 0.001, "its program")

    def works(host: int) -> bool:
        try:
            paper_alpha(_costs("7B", K * K, host_gib=host))
        except ValueError:
            return False
        return True

    least = next(host for host in range(1, 4096) if works(host))
    published = paper.LEAST_HOST_GIB
    what = "least host memory of a node that fits, 7B at 1024K"
    yield Row(what, "GiB", published, least, published, published, "its program")


def _longest() -> Iterator[Row]:
    megatron, memo = paper.LONGEST_7B["Megatron-LM"] / K, paper.LONGEST_7B["MEMO"] / K
    what = "longest context, 7B, 8 GPUs"
    full = _longest_that(lambda job: memory.full_recompute(job))
    remark = "Megatron-LM; fragmentation is not counted"
    yield Row(f"{what}, full recompute", "K tokens", megatron, full, 0.8 * megatron, 1.2 * megatron,
              remark)  # fmt: skip
    own = _longest_that(lambda job: memory.paper_memo(job))
    remark = "with Megatron's fp32 logits; the paper does not describe its loss head"
    yield Row(f"{what}, paper's policy", "K tokens", memo, own, memo, MOST / K, remark)
    fused = _longest_that(lambda job: memory.paper_memo(job, fused_head=True))
    remark = "as above, but cross entropy in place on 16-bit logits"
    yield Row(f"{what}, paper's policy", "K tokens", memo, fused, memo, MOST / K, remark)


def _longest_that(peak: Callable[[Job], Peak]) -> float | None:
    """K tokens up to which the GPU's memory is enough, in steps of `STEP`."""

    def fits(steps: int) -> bool:
        # The paper's models have no RoPE; what positions cost is not told.
        job = replace(paper.job("7B", steps * STEP), rope=False)
        machine = replace(paper.machine(), host_memory=1 << 60)
        return not problems_of(machine, peak(job), DEFAULT_RESERVE)

    return _last(fits)


def _ours() -> Iterator[Row]:
    for what, costs in (
        ("7B at 1024K, 8 GPUs", _costs("7B", K * K)),
        ("65B at 1408K, 64 GPUs (tp 8, cp 8)", _costs("65B", LONGER, cp=8)),
    ):
        memo = best_memo(costs, DEFAULT_RESERVE)
        one = answer(costs, memo)
        where = (
            f"ratio {memo.ratio:.3f}, {memo.chunked(costs.job)} chunks, resident {memo.resident}"
        )
        yield Row(f"MFU, {what}, ours", "%", None, 100 * one.result.mfu_causal, remark=where)
        gib = one.peak.parts.total / 2**30
        yield Row(f"GPU memory, {what}, ours", "GiB", None, gib, remark=where)
        for name, way in (("full recompute", FullRecompute()), ("keeping all", Stock())):
            other = answer(costs, way)
            fits = "fits" if other.fits else "does not fit"
            mfu = 100 * other.result.mfu_causal
            yield Row(f"MFU, {what}, {name}", "%", None, mfu, remark=fits)

    def fits(steps: int) -> bool:
        costs = _costs("7B", steps * STEP)
        peak = peak_by_arithmetic(costs, best_memo(costs, DEFAULT_RESERVE, steps=1))
        return not problems_of(costs.machine, peak, DEFAULT_RESERVE)

    yield Row(
        "longest context, 7B, 8 GPUs, ours", "K tokens", None, _last(fits),
        remark="with RoPE and 2 TiB of host memory a node",
    )  # fmt: skip


def _last(fits: Callable[[int], bool]) -> float | None:
    """K tokens of the largest number of steps that fits; memory grows with the length."""
    if not fits(1):
        return None
    low, high = 1, MOST // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * STEP / K


def _costs(name: str, tokens: int, *, host_gib: int = 2048, cp: int = 1) -> Costs:
    return Costs(paper.job(name, tokens, cp=cp), paper.machine(host_gib))


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
