"""The ways of training one job that an estimate sets side by side."""

from __future__ import annotations

from dataclasses import replace

from megatron_memo.config import MemoConfig
from megatron_memo.estimate.answer import (
    Answer,
    answer,
    best_ratio,
    peak_by_arithmetic,
    problems_of,
)
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import Run, memo_strategy
from megatron_memo.estimate.strategies import (
    FineGrainedOffload,
    FullRecompute,
    Memo,
    Stock,
    Strategy,
)

_MANY_CHUNKS = 32


def own_strategy(run: Run, costs: Costs, reserve: int) -> Strategy:
    """What the run's flags ask for; a ratio of "auto" is chosen.

    Raises:
        ValueError: see `memo_strategy`.
    """
    if run.memo is None:
        return run.strategy
    memo = memo_strategy(run.job, run.memo, run.loss_chunks, costs.machine.gpu.memory)
    return best_ratio(costs, memo, reserve=reserve) if run.auto else memo


def all_ways(costs: Costs, reserve: int) -> list[Strategy]:
    """Stock, full recompute, Megatron's fine-grained offload (of dense layers), memo at its best
    ratio with everything else by default."""
    dense: list[Strategy] = [] if costs.job.experts else [FineGrainedOffload()]
    return [Stock(), FullRecompute(), *dense, best_memo(costs, reserve)]


def best_memo(costs: Costs, reserve: int, *, steps: int = 16) -> Memo:
    """Memo at its best ratio, everything else by default; what frees more memory if need be."""
    default = memo_strategy(costs.job, MemoConfig(0.5), None, costs.machine.gpu.memory)
    found = None
    frugal = replace(default, resident=0)
    for memo in (default, frugal, replace(frugal, chunks=_MANY_CHUNKS)):
        try:
            one = best_ratio(costs, memo, reserve=reserve, steps=steps)
            fits = not problems_of(costs.machine, peak_by_arithmetic(costs, one), reserve)
        except ValueError:
            continue  # more chunks than tokens
        if fits:
            return one
        found = one
    return found or default


def beside(own: Answer, costs: Costs, reserve: int) -> list[Answer]:
    """All ways, `own` in the place of its kind."""
    ways = all_ways(costs, reserve)
    return [
        own if type(way) is type(own.strategy) else answer(costs, way, reserve=reserve)
        for way in ways
    ]
