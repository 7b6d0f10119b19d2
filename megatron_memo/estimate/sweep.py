"""``--sweep`` and ``--search``: many estimates by arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_memo.estimate.answer import Answer, answer
from megatron_memo.estimate.changes import memo_takes_context_parallel, relaid
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import FullRecompute, Memo, Stock, Strategy
from megatron_memo.estimate.ways import all_ways, best_memo

SWEEPS = ("seq-length",)
_LENGTH = re.compile(r"(\d+)([km]?)", re.IGNORECASE)
_LONGEST = 1 << 30  # tokens
_STEPS = 4  # ratios that are tried for each layout of a search
_CHUNKS = (None, 16, 32)


@dataclass(frozen=True)
class Layout:
    """A layout of a search with its estimate."""

    job: Job
    answer: Answer


def lengths(text: str, now: int) -> list[int]:
    """What ``--sweep`` asks for.

    Args:
        text: "seq-length" (from an eighth to eight times of `now`, doubling), or with
            "=64K..1M" (doubling) or "=64K,100000,1M" after it. K is 1024 and M 1024K.
        now: tokens of the run.

    Raises:
        ValueError: something else.
    """
    name, given, values = text.partition("=")
    if name not in SWEEPS:
        raise ValueError(f"--sweep {text}: can go over {', '.join(SWEEPS)}.")
    if given and not values.strip():
        raise ValueError(
            f"--sweep {text}: no lengths follow. Give some, as in --sweep seq-length=64K..1M, or "
            "--sweep seq-length for those around the run's own."
        )
    if not given:
        low, high = max(now // 8, 1), 8 * now
    elif ".." in values:
        first, _, last = values.partition("..")
        low, high = _tokens(text, first), _tokens(text, last)
        if low > high:
            raise ValueError(f"--sweep {text}: {first} is more than {last}. Swap them.")
    else:
        return [_tokens(text, value) for value in values.split(",")]
    found = [low]
    while found[-1] * 2 <= high:
        found.append(found[-1] * 2)
    return found


def _tokens(text: str, value: str) -> int:
    match = _LENGTH.fullmatch(value.strip())
    factor = {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    tokens = int(match[1]) * factor if match else 0
    if not 0 < tokens <= _LONGEST:
        raise ValueError(f"--sweep {text}: {value!r} is no number of tokens, such as 65536 or 64K.")
    return tokens


def sweep(costs: Costs, tokens: Sequence[int], reserve: int) -> Iterator[tuple[int, list[Answer]]]:
    """The four ways at each length; memo with the ratio that is best there.

    Raises:
        ValueError: a length that the layout does not divide.
    """
    for length in tokens:
        job = replace(costs.job, sequence=length)
        there = Costs(job, costs.machine, costs.efficiency)
        yield length, [answer(there, each, reserve=reserve) for each in all_ways(there, reserve)]


def layouts(job: Job, gpus: int) -> list[Job]:
    """Every way to lay the job out over its GPUs: tensor parallelism within a node."""
    found = []
    for tp in _divisors(job.ranks):
        if tp > gpus:
            continue
        for pp in _divisors(job.ranks // tp):
            for cp in _divisors(job.ranks // tp // pp):
                other = relaid(job, tp, pp, cp)
                if other is not None:
                    found.append(other)
    return found


def search(costs: Costs, job: Job, reserve: int) -> list[Layout]:
    """Estimates of one layout: full recompute or stock where they fit, and memo's chunk counts."""
    there = Costs(job, costs.machine, costs.efficiency)
    ways: list[Strategy] = [Stock(), FullRecompute()]
    if job.cp == 1 or memo_takes_context_parallel():
        best = best_memo(there, reserve, steps=_STEPS)
        ways += [
            replace(best, chunks=chunks, resident=resident)
            for chunks in _CHUNKS
            for resident in {best.resident, 0}
        ]
    found = []
    for way in ways:
        try:
            found.append(Layout(job, answer(there, way, reserve=reserve)))
        except ValueError:
            continue  # more chunks than tokens
    return found


def layout_of(one: Layout) -> str:
    """Flags of a layout and of what is done about activations."""
    job, way = one.job, one.answer.strategy
    words = [f"tp {job.tp}", f"pp {job.pp}", f"cp {job.cp}", f"dp {job.dp}"]
    words.append(one.answer.name)
    if isinstance(way, Memo):
        words.append(f"chunks {way.chunked(job)} resident {way.resident}")
    return ", ".join(words)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
