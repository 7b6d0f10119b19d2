"""What one way of training a job costs on a machine: memory, time, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_memo.config import MemoConfig
from megatron_memo.estimate import memory
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine
from megatron_memo.estimate.parts import Peak
from megatron_memo.estimate.strategies import (
    FineGrainedOffload,
    FullRecompute,
    Memo,
    PaperMemo,
    Strategy,
)
from megatron_memo.estimate.timeline import Result, simulate
from megatron_memo.sizes import size_words

# Kept for what no trace of tensors shows: CUDA's context, NCCL's buffers, fragmentation. A guess.
DEFAULT_RESERVE = 2 << 30


@dataclass(frozen=True)
class Answer:
    """One way's cost.

    Attributes:
        strategy: the way.
        peak: memory of the GPU that needs most, and its host bytes.
        profiled: whether `peak` is from a profile; else by arithmetic.
        result: the simulated iteration.
        problems: what does not fit, one phrase each.
    """

    strategy: Strategy
    peak: Peak
    profiled: bool
    result: Result
    problems: tuple[str, ...]

    @property
    def host_bytes(self) -> int:
        """Of the rank that needs most; what is spilled to disk is not in it."""
        return self.peak.host_bytes - self.result.disk_peak

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def name(self) -> str:
        return self.strategy.name


def answer(
    costs: Costs,
    strategy: Strategy,
    *,
    reserve: int = DEFAULT_RESERVE,
    peak: Peak | None = None,
) -> Answer:
    """Memory and time of one way.

    Args:
        costs: of the job on its machine.
        strategy: the way.
        reserve: bytes of a GPU that tensors may not have.
        peak: from a profile; None takes the arithmetic one.
    """
    known = peak_by_arithmetic(costs, strategy) if peak is None else peak
    result = simulate(costs, strategy)
    return Answer(
        strategy, known, peak is not None, result, problems_of(costs.machine, known, reserve)
    )


def problems_of(machine: Machine, peak: Peak, reserve: int) -> tuple[str, ...]:
    """What does not fit, one phrase each."""
    found = []
    over = peak.parts.total - (machine.gpu.memory - reserve)
    if over > 0:
        found.append(f"device: {size_words(over)} too much")
    over = peak.host_bytes - machine.host_memory_of_gpu - machine.disk // machine.gpus
    if over > 0:
        found.append(f"host: {size_words(over)} too much for each GPU")
    return tuple(found)


def peak_by_arithmetic(costs: Costs, strategy: Strategy) -> Peak:
    """See `estimate.memory`."""
    job = costs.job
    strategy = strategy.of(job)
    if isinstance(strategy, Memo):
        return memory.memo(job, settings_of(strategy), strategy.loss, depth=strategy.depth)
    if isinstance(strategy, PaperMemo):
        return memory.paper_memo(job)
    if isinstance(strategy, FullRecompute):
        return memory.full_recompute(job)
    if isinstance(strategy, FineGrainedOffload):
        return memory.fine_grained(job, strategy.modules)
    return memory.stock(job)


def settings_of(memo: Memo) -> MemoConfig:
    """The settings that the layer would get."""
    return MemoConfig(memo.ratio, memo.chunks, memo.resident, moe_experts=memo.experts)


def best_ratio(
    costs: Costs, memo: Memo, *, reserve: int = DEFAULT_RESERVE, steps: int = 16
) -> Memo:
    """The swap ratio that fits and gives the shortest step.

    Where none fits, the one that comes nearest.

    Args:
        costs: of the job on its machine.
        memo: its ratio is not looked at.
        reserve: see `answer`.
        steps: ratios between 0 and 1 that are looked at, besides the most that the host holds.
    """
    peaks = {}
    for ratio in _ratios(costs, memo, steps):
        one = replace(memo, ratio=ratio)
        peaks[one] = peak_by_arithmetic(costs, one)
    fitting = [one for one, peak in peaks.items() if not problems_of(costs.machine, peak, reserve)]
    if not fitting:
        return min(peaks, key=lambda one: _excess(costs.machine, peaks[one]))
    return _shortest(costs, fitting)


# A profile finds at most so many times the host memory that arithmetic does
# (tests/estimate/test_kinds.py), and what is chosen by arithmetic has to fit by profile as well.
_PROFILE_FINDS = 1.002


def _ratios(costs: Costs, memo: Memo, steps: int) -> list[float]:
    """Those to look at, ascending, each a whole number of rows."""
    ratios = {k / steps for k in range(steps + 1)}
    host = costs.machine.host_memory_of_gpu + costs.machine.disk // costs.machine.gpus
    least, most = (
        peak_by_arithmetic(costs, replace(memo, ratio=ratio)).host_bytes for ratio in (0.0, 1.0)
    )
    host = math.floor(host / _PROFILE_FINDS)
    if least <= host < most:
        ratios.add((host - least) / (most - least))
    rows = costs.job.local_tokens // costs.job.micro_batch
    return sorted({math.floor(ratio * rows) / rows for ratio in ratios})


def _shortest(costs: Costs, ascending: Sequence[Memo]) -> Memo:
    """Less is recomputed with every larger ratio, until compute waits for copies: one valley."""
    seconds: dict[Memo, float] = {}

    def of(one: Memo) -> float:
        if one not in seconds:
            seconds[one] = simulate(costs, one).seconds
        return seconds[one]

    low, high = 0, len(ascending) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if of(ascending[middle]) <= of(ascending[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return ascending[low]


def _excess(machine: Machine, peak: Peak) -> float:
    host = max(machine.host_memory_of_gpu, 1)
    return max(peak.parts.total / machine.gpu.memory, peak.host_bytes / host)


def plain(one: Answer) -> dict[str, Any]:
    """For `--json`. Bytes and seconds."""
    result = one.result
    return {
        "name": one.name,
        "fits": one.fits,
        "problems": list(one.problems),
        "device_bytes": one.peak.parts.total,
        "device_held_bytes": one.peak.held,
        "device_parts": one.peak.parts.by_name(),
        "device_peak_in": one.peak.where,
        "device_from": "profile" if one.profiled else "arithmetic",
        "host_bytes": one.host_bytes,
        "disk_bytes": result.disk_peak,
        "step_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "mfu_full": result.mfu_full,
        "mfu_causal": result.mfu_causal,
        "exposed_seconds": result.exposed,
    }
