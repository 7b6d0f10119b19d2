"""From traces to one plan: windows solved one after another, for one arena.

Iterations of different shapes (training, evaluation, sequence lengths) never run at once, so each
trace is a window of its own; the arena is as large as the window that needs most, and the others
only have to fit it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_memo import __version__
from megatron_memo.profile.trace import Trace

from .board import Incumbent
from .passes import passes_of
from .plan_file import Entry, Plan, PlanError, Window
from .portfolio import Solution, Status, solve
from .problem import Problem, load_bound
from .requests import Requests, requests_of
from .verify_plan import verify_plan

MADE_BY = f"megatron-memo {__version__}"
# What a window gets for its search after the user broke off: a few greedy passes.
LEAST_SECONDS = 2.0

Progress = Callable[[str, Incumbent, int], None]


@dataclass(frozen=True)
class Source:
    """A trace, the name of its file and the sha256 of that file's bytes."""

    name: str
    sha256: str
    trace: Trace


@dataclass(frozen=True)
class Planned:
    """A verified plan and how it came about. `requests` are those of its windows."""

    plan: Plan
    requests: tuple[Requests, ...]
    interrupted: bool
    timed_out: bool
    seconds: float


@dataclass(frozen=True)
class Search:
    """How to search; see `portfolio.solve`. `time_limit` is for all windows together."""

    time_limit: float = 60.0
    workers: int = 2
    seed: int = 0
    deterministic: bool = False
    use_cp_sat: bool = True


def make_plan(
    sources: Sequence[Source],
    search: Search,
    *,
    smallest: int | None = None,
    progress: Progress | None = None,
) -> Planned:
    """One plan for all traces. Ctrl-C ends the search early, with the best layouts so far.

    Args:
        smallest: bytes below which a rounded request is left to the native allocator; the rounding
            unit if left out.
        progress: called with (source's name, best layout, bound) when something better is found.

    Raises:
        PlanError: the traces are not of one process, or hold nothing that can be planned.
        ProblemError: the solvers can't take the sizes.
    """
    began = time.monotonic()
    _check_together(sources)
    all_requests = [requests_of(source.trace, smallest) for source in sources]
    problems = {k: r.problem() for k, r in enumerate(all_requests) if r.planned}
    if not problems:
        raise PlanError(
            f"{sources[0].name}: no request can be planned: each outlives the iteration or is "
            f"below {all_requests[0].smallest} bytes"
        )
    loads = {k: load_bound(problem) for k, problem in problems.items()}
    arena, bound, bound_by, found_by = 0, 0, "load", ""
    interrupted = timed_out = False
    offsets: dict[int, dict[int, int]] = {}
    for turn, k in enumerate(sorted(problems, key=lambda k: -loads[k])):
        left = search.time_limit - (time.monotonic() - began)
        limit = max(LEAST_SECONDS, left / (len(problems) - turn))
        if interrupted:
            limit = LEAST_SECONDS
        requests = all_requests[k]
        solution = _solve(sources[k].name, requests, problems[k], arena, limit, search, progress)
        assert solution.best is not None
        interrupted |= solution.interrupted
        timed_out |= solution.timed_out
        offsets[k] = dict(zip(requests.planned, solution.best.offsets, strict=True))
        if solution.best.peak > arena:
            arena, found_by = solution.best.peak, solution.best.found_by
        if solution.bound > bound:
            bound, bound_by = solution.bound, solution.bound_by

    def assemble() -> Plan:
        header = sources[0].trace.header
        plan = Plan(
            device=header.device,
            rank=header.rank,
            world_size=header.world_size,
            same_ranks=header.same_ranks,
            rounding=header.rounding,
            smallest=all_requests[0].smallest,
            arena=arena,
            bound=bound,
            bound_by=bound_by,
            found_by=found_by,
            made_by=MADE_BY,
            windows=tuple(
                _window(source, requests, offsets.get(k, {}))
                for k, (source, requests) in enumerate(zip(sources, all_requests, strict=True))
            ),
        )
        verify_plan(plan)
        return plan

    try:
        plan = assemble()
    except KeyboardInterrupt:  # the search is over: what it found is not given up
        interrupted, plan = True, assemble()
    seconds = time.monotonic() - began
    return Planned(plan, tuple(all_requests), interrupted, timed_out, seconds)


def _solve(
    name: str,
    requests: Requests,
    problem: Problem,
    arena: int,
    limit: float,
    search: Search,
    progress: Progress | None,
) -> Solution:
    def report(best: Incumbent, bound: int) -> None:
        if progress is not None:
            progress(name, best, bound)

    def run(problem: Problem) -> Solution:
        return solve(
            problem,
            time_limit=limit,
            workers=search.workers,
            seed=search.seed,
            deterministic=search.deterministic,
            use_cp_sat=search.use_cp_sat,
            passes=passes_of(requests, problem.buffers),
            progress=report,
        )

    # Where an arena is there already any layout that fits it will do.
    solution = run(Problem(problem.buffers, arena or None))
    if solution.status is Status.INFEASIBLE and solution.best is None:
        solution = run(problem)
    return solution


def _check_together(sources: Sequence[Source]) -> None:
    if not sources:
        raise PlanError("there is no trace to plan")
    first = sources[0]
    for other in sources[1:]:
        for name in ("device", "rounding", "rank", "world_size"):
            mine, theirs = getattr(first.trace.header, name), getattr(other.trace.header, name)
            if mine != theirs:
                raise PlanError(
                    f"{first.name} has {name} {mine}, {other.name} has {theirs}: a plan is for one "
                    "process; give the folder of the traces for one plan each"
                )


def _window(source: Source, requests: Requests, offsets: dict[int, int]) -> Window:
    header = source.trace.header
    return Window(
        source=source.name,
        sha256=source.sha256,
        fingerprint=header.fingerprint,
        iteration=header.iteration,
        stream=requests.stream,
        phases=source.trace.phases,
        entries=tuple(
            Entry(r.phase, r.size, r.stream, offsets.get(k), r.lower, r.upper)
            for k, r in enumerate(requests.requests)
        ),
    )
