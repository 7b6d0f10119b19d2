"""What to change: each change is estimated as if it had been made, and the best are told."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_memo.config import DEFAULT_RESIDENT_LAYERS
from megatron_memo.estimate.answer import (
    Answer,
    answer,
    best_ratio,
    peak_by_arithmetic,
    problems_of,
    settings_of,
)
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import memo_strategy
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import Memo, Strategy
from megatron_memo.sizes import size_words

_WORTH_TIME, _WORTH_MEMORY = 0.005, 0.02  # smaller gains are not told
_STEPS = 4  # ratios that are tried for one change
_SHALLOW = 4  # steps in flight: little memory, and the next copies are still under way
_TOLD = 3


@dataclass(frozen=True)
class Change:
    """A change and what it would cost then.

    Attributes:
        what: in words, flags in them.
        then: the estimate with it.
    """

    what: str
    then: Answer

    def gain(self, now: Answer) -> str:
        """What it buys, as a phrase."""
        parts = []
        bytes_now, bytes_then = now.peak.parts.total, self.then.peak.parts.total
        if abs(bytes_now - bytes_then) > _WORTH_MEMORY * bytes_now:
            parts.append(f"device {size_words(bytes_now)} -> {size_words(bytes_then)}")
        if abs(now.host_bytes - self.then.host_bytes) > _WORTH_MEMORY * max(now.host_bytes, 1):
            parts.append(f"host {size_words(now.host_bytes)} -> {size_words(self.then.host_bytes)}")
        speed = self.then.result.tokens_per_second / now.result.tokens_per_second
        parts.append(f"{speed - 1:+.1%} tokens/s")
        if self.then.fits and not now.fits:
            parts.append("then it fits")
        elif not self.then.fits:
            parts.append("does not fit yet" if not now.fits else "no longer fits")
        return ", ".join(parts)


def best_changes(costs: Costs, now: Answer, *, auto: bool, reserve: int) -> list[Change]:
    """The three that help most, best first; fewer where fewer help.

    Where the run does not fit, those after which it does come first, the fastest before others,
    then those that save most memory. Where it fits, what makes it faster, then what frees memory.

    Args:
        costs: of the job on its machine.
        now: the estimate without a change, by arithmetic like those with one.
        auto: the swap ratio is chosen anew with each change.
        reserve: see `answer`.
    """
    tried = []
    for what, changed, strategy in _changes(costs, now.strategy, reserve):
        try:
            if auto and isinstance(strategy, Memo):
                strategy = best_ratio(changed, strategy, reserve=reserve, steps=_STEPS)
            peak = peak_by_arithmetic(changed, strategy)
        except ValueError:
            continue  # an impossible layout, more chunks than tokens
        fits = not problems_of(changed.machine, peak, reserve)
        tried.append((not fits, peak.parts.total + peak.host_bytes, what, changed, strategy))
    # Time is simulated only where it counts: of what fits, else of what comes nearest.
    fitting = [one for one in tried if not one[0]]
    worth = fitting or ([] if now.fits else sorted(tried, key=lambda one: one[1])[:_TOLD])
    found = [
        Change(what, answer(changed, strategy, reserve=reserve))
        for _, _, what, changed, strategy in worth
    ]
    helps = [change for change in found if _rank(change, now) is not None]
    best: dict[str, Change] = {}  # one of a kind: of two numbers for a flag the better one
    for change in sorted(helps, key=lambda change: _rank(change, now) or ()):
        best.setdefault(change.what.split()[0], change)
    return list(best.values())[:_TOLD]


def _rank(change: Change, now: Answer) -> tuple[float, ...] | None:
    """Smaller is better; None where it does not help."""
    then = change.then
    slower = now.result.tokens_per_second / then.result.tokens_per_second
    smaller = _excess(then) / _excess(now)
    if not now.fits:
        if then.fits:
            return 0, slower
        return (1, smaller) if smaller < 1 - _WORTH_MEMORY else None
    if not then.fits:
        return None
    if slower < 1 - _WORTH_TIME:
        return 0, slower
    return (1, smaller) if smaller < 1 - _WORTH_MEMORY and slower < 1 + _WORTH_MEMORY else None


def _excess(one: Answer) -> float:
    """Memory, as far as it is what does not fit."""
    if any(problem.startswith("host") for problem in one.problems):
        return one.peak.parts.total + one.host_bytes
    return one.peak.parts.total


def _changes(
    costs: Costs, strategy: Strategy, reserve: int
) -> Iterator[tuple[str, Costs, Strategy]]:
    if isinstance(strategy, Memo):
        for what, other in _of_memo(costs, strategy, reserve):
            yield what, costs, other
    else:
        default = Memo(ratio=0.5, resident=DEFAULT_RESIDENT_LAYERS)
        best = best_ratio(costs, _fitted(costs.job, default, costs), reserve=reserve)
        yield f"--memo-swap-ratio {best.ratio:.2g}", costs, best
    for what, job in _layouts(costs.job, isinstance(strategy, Memo)):
        changed = Costs(job, costs.machine, costs.efficiency)
        memo = isinstance(strategy, Memo)
        yield what, changed, _fitted(job, strategy, changed) if memo else strategy
    if isinstance(strategy, Memo):
        now = costs.machine
        more = replace(now, host_memory=now.host_memory * 3 // 2, host_free=now.host_free * 3 // 2)
        what = f"{size_words(more.host_memory)} of host memory a node"
        changed = Costs(costs.job, more, costs.efficiency)
        yield what, changed, best_ratio(changed, strategy, reserve=reserve, steps=_STEPS)


def _of_memo(costs: Costs, memo: Memo, reserve: int) -> Iterator[tuple[str, Memo]]:
    best = best_ratio(costs, memo, reserve=reserve)
    if abs(best.ratio - memo.ratio) > 0.01:
        yield f"--memo-swap-ratio {best.ratio:.2g}", best
    chunks = memo.chunked(costs.job) or 1
    for count in (2 * chunks, 4 * chunks, chunks // 2):
        if count >= 1:
            yield f"--memo-chunks {count}", replace(memo, chunks=count)
    for resident in {0, DEFAULT_RESIDENT_LAYERS} - {memo.resident}:
        yield f"--memo-resident-layers {resident}", replace(memo, resident=resident)
        both = replace(memo, resident=resident, chunks=2 * chunks)
        yield f"--memo-resident-layers {resident} --memo-chunks {2 * chunks}", both
    depth = memo.of(costs.job).depth
    if depth is None or depth > _SHALLOW:
        yield f"--memo-prefetch-depth {_SHALLOW}", replace(memo, depth=None, prefetch=_SHALLOW)
    loss = memo.loss or 1
    yield f"--memo-loss-chunks {4 * loss}", replace(memo, loss=4 * loss)


def _fitted(job: Job, strategy: Strategy, costs: Costs) -> Memo:
    """The same settings, the loss head chosen for the job."""
    assert isinstance(strategy, Memo)
    fitted = memo_strategy(job, settings_of(strategy), None, costs.machine.gpu.memory)
    loss = max(fitted.loss or 1, strategy.loss or 1)
    return replace(
        fitted, depth=strategy.depth, prefetch=strategy.prefetch, loss=loss if loss > 1 else None
    )


def _layouts(job: Job, memo: bool) -> Iterator[tuple[str, Job]]:
    """The same GPUs and global batch, split in another way."""
    tp, pp, cp, dp = job.tp, job.pp, job.cp, job.dp
    if tp > 1 and not job.sequence_parallel:
        yield "--sequence-parallel", replace(job, sequence_parallel=True)
    if dp * cp > 1 and not job.distributed_optimizer:
        yield "--use-distributed-optimizer", replace(job, distributed_optimizer=True)
    if tp > 1 and not job.overlap_tp and not memo:  # memo's layer refuses it
        yield "--tp-comm-overlap (Transformer Engine)", replace(job, overlap_tp=True)
    if dp > 1 and not job.overlap_grad_reduce:
        yield "--overlap-grad-reduce", replace(job, overlap_grad_reduce=True)
    splits = [(2 * tp, pp, cp), (tp, 2 * pp, cp), (tp // 2, 2 * pp, cp), (2 * tp, pp // 2, cp)]
    if not memo or memo_takes_context_parallel():
        splits += [(tp, pp, 2 * cp), (tp // 2, pp, 2 * cp)]
    for split in splits:
        other = relaid(job, *split)
        if other is not None:
            yield layout_words(job, other), other


def relaid(job: Job, tp: int, pp: int, cp: int) -> Job | None:
    """The job over the same GPUs with the same global batch; None where that can't be."""
    sizes = tp * pp * cp
    if min(tp, pp, cp) < 1 or job.ranks % sizes:
        return None
    dp, sequences = job.ranks // sizes, job.micro_batches * job.dp
    if sequences % dp or (job.virtual > 1 and pp != job.pp):
        return None
    try:
        return replace(
            job,
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            micro_batches=sequences // dp,
            sequence_parallel=tp > 1,
            layout=job.layout if pp == job.pp else None,
            vocabulary=-(-job.vocabulary // (128 * tp)) * 128 * tp,
        )
    except ValueError:
        return None


def layout_words(before: Job, after: Job) -> str:
    """Flags that differ."""
    flags = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
    }
    differing = [
        f"{flag} {getattr(after, name)}"
        for name, flag in flags.items()
        if getattr(after, name) != getattr(before, name)
    ]
    if before.layout is not None and after.layout is None:
        differing.append("without --pipeline-model-parallel-layout")
    return " ".join(differing)


def memo_takes_context_parallel() -> bool:
    """Whether memo composes with context parallelism, asked of its own refusals."""
    from megatron_memo.refusals import REFUSALS

    args = argparse.Namespace(context_parallel_size=2, cp_comm_type=["p2p"])
    return not any(r.attribute == "context_parallel_size" and r.test(args) for r in REFUSALS)
