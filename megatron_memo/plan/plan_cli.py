"""``megatron-memo plan TRACE... -o PLAN``: a verified memory plan from traces.

Exit status: 0 written, 2 broken input or the plan can't be written, 4 interrupted and the best plan
so far was written, 130 interrupted before there was one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_memo.cli_help import HelpFormatter
from megatron_memo.exit_status import Exit
from megatron_memo.profile.trace import read_trace

from .board import Incumbent
from .cli_parts import (
    add_search_arguments,
    check_output,
    note_slow_solvers,
    positive,
    terminate_as_interrupt,
    uninterrupted,
    worker_count,
)
from .plan_file import PlanError, digest_of, write_plan
from .planner import Planned, Search, Source, make_plan
from .savings import Savings, savings_of

HELP = "Lay out the memory of training iterations from their traces, with proof."
_EPILOG = """\
examples: a plan for each trace of a folder; one arena for training and evaluation

  megatron-memo plan traces -o plans
  megatron-memo plan train.trace.jsonl.gz eval.trace.jsonl.gz -o rank-0.plan.jsonl --time-limit 600

Ctrl-C and SIGTERM end the search. Every plan is verified before it is written; `megatron-memo
verify` does it again.

Exit status: 0 written, 2 broken input or the plan can't be written, 4 interrupted and the best plan
so far was written, 130 interrupted before there was one."""
TRACES = ("*.trace.jsonl", "*.trace.jsonl.gz")
PROGRESS_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `plan`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="traces of `megatron-memo profile`, of the allocator or of a memory snapshot. Several "
        "(training and evaluation, sequence lengths) of one process get one arena. A folder: one "
        "plan for each trace in it",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PLAN",
        type=Path,
        required=True,
        help="where to write the plan, whole or not at all; for a folder of traces a folder",
    )
    parser.add_argument(
        "--smallest",
        metavar="BYTES",
        type=positive,
        default=None,
        help="leave requests that are smaller, when rounded, to the native allocator (default: the "
        "unit that the allocator rounds to, so none)",
    )
    add_search_arguments(parser, "plan")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of text"
    )


def run(args: argparse.Namespace) -> int:
    """Reads, solves, verifies, writes and prints; returns the exit status."""
    try:
        with terminate_as_interrupt():
            return _run(args)
    except ValueError as error:
        print(f"megatron-memo plan: error: {error}", file=sys.stderr)
        return Exit.MISTAKE
    except KeyboardInterrupt:
        print("megatron-memo plan: interrupted, no plan was written", file=sys.stderr)
        return Exit.INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    jobs = _jobs(args.traces, args.output)
    note_slow_solvers("megatron-memo plan")
    results: list[dict[str, Any]] = []
    status = 0
    for traces, target in jobs:
        planned = make_plan(
            [Source(path.name, digest_of(path), read_trace(path)) for path in traces],
            Search(args.time_limit, worker_count(args), args.seed, args.deterministic),
            smallest=args.smallest,
            progress=_Progress(),
        )
        with uninterrupted():
            write_plan(target, planned.plan)
        savings = None
        if planned.plan.device == "cuda" and not planned.interrupted:
            savings = _savings(planned)
        results.append(as_json(planned, savings, target))
        if not args.json:
            print("\n".join(as_text(planned, savings, target)), flush=True)
        if planned.interrupted:
            status = Exit.UNFINISHED
            break
    if status and len(results) < len(jobs):
        missing = len(jobs) - len(results)
        print(f"megatron-memo plan: interrupted, {missing} plans are missing", file=sys.stderr)
    if args.json:
        print(json.dumps(results if args.traces[0].is_dir() else results[0], indent=2))
    return status


def _savings(planned: Planned) -> Savings | None:
    """None when interrupted: the plan is written already."""
    try:
        return savings_of(planned.requests)
    except KeyboardInterrupt:
        return None


def _jobs(traces: Sequence[Path], output: Path) -> list[tuple[list[Path], Path]]:
    """(traces, plan) of each plan to make. Raises PlanError before any work that would be lost."""
    folders = [path for path in traces if path.is_dir()]
    if not folders:
        check_output(traces, output)
        return [(list(traces), output)]
    if len(traces) > 1:
        raise PlanError(f"{folders[0]}: give one folder alone, or files alone")
    folder = folders[0]
    found = sorted(path for pattern in TRACES for path in folder.glob(pattern))
    if not found:
        raise PlanError(f"{folder}: no trace in this folder ({' or '.join(TRACES)})")
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise PlanError(f"{output}: {error.strerror or error}") from error
    jobs: list[tuple[list[Path], Path]] = []
    for path in found:
        target = output / f"{path.name.split('.trace.jsonl')[0]}.plan.jsonl"
        if any(target == other for _, other in jobs):
            raise PlanError(f"{path}: this trace is there twice, plain and gzipped")
        check_output([path], target)
        jobs.append(([path], target))
    return jobs


class _Progress:
    """Lines on stderr for better layouts, at most one a second."""

    def __init__(self) -> None:
        self._last = -PROGRESS_SECONDS

    def __call__(self, name: str, best: Incumbent, bound: int) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            above = f"{best.peak / bound - 1:.3%} above the bound" if bound else ""
            print(f"{name}: {size_text(best.peak)}, {above} ({best.found_by})", file=sys.stderr)


def as_json(planned: Planned, savings: Savings | None, target: Path) -> dict[str, Any]:
    """What `--json` prints; sizes in bytes."""
    plan = planned.plan
    return {
        "plan": str(target),
        "arena": plan.arena,
        "lower_bound": plan.bound,
        "lower_bound_by": plan.bound_by,
        "gap": plan.gap,
        "optimal": plan.gap == 0,
        "found_by": plan.found_by,
        "verified": True,
        "seconds": round(planned.seconds, 3),
        "interrupted": planned.interrupted,
        "timed_out": planned.timed_out,
        "windows": [
            {
                "source": window.source,
                "requests": len(requests.requests),
                "planned": len(requests.planned),
                "native_peak": requests.native_bytes()[0],
                "native_at_end": requests.native_bytes()[1],
            }
            for window, requests in zip(plan.windows, planned.requests, strict=True)
        ],
        "caching_allocator": None
        if savings is None
        else {
            "native": savings.native,
            "expandable_segments": savings.expandable,
            "iterations": savings.iterations,
        },
    }


def as_text(planned: Planned, savings: Savings | None, target: Path) -> list[str]:
    """The same in words."""
    plan = planned.plan
    lines = []
    if planned.interrupted:
        lines.append("interrupted: this is the best plan so far")
    elif planned.timed_out and plan.gap:
        lines.append("the time limit was reached")
    for window, requests in zip(plan.windows, planned.requests, strict=True):
        peak, at_end = requests.native_bytes()
        lines.append(
            f"{window.source}: {len(requests.planned)} of {len(requests.requests)} requests "
            f"planned; the native allocator serves the others, {size_text(peak)} at most, "
            f"{size_text(at_end)} of it beyond the iteration"
        )
    gap = "gap 0: optimal" if not plan.gap else f"gap {plan.gap} ({plan.gap / plan.bound:.3%})"
    lines.append(
        f"arena {plan.arena} bytes ({size_text(plan.arena)}), proven lower bound {plan.bound} "
        f"(by {plan.bound_by}), {gap}"
    )
    lines.append(f"found by {plan.found_by}, verified; {planned.seconds:.1f} s")
    if savings is not None:
        words = [
            f"{name} {size_text(value)} ({value / plan.arena:.2f} times the plan)"
            for name, value in (
                ("native", savings.native),
                ("with expandable segments", savings.expandable),
            )
        ]
        lines.append(
            f"PyTorch's caching allocator would reserve, after {savings.iterations} iterations: "
            f"{words[0]}, {words[1]} (simulated)"
        )
    lines.append(f"written to {target}")
    return lines


def size_text(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def main() -> int:
    """`python -m megatron_memo.plan.plan_cli`, the command by itself."""
    parser = argparse.ArgumentParser(
        prog="megatron-memo plan", description=HELP, formatter_class=HelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
