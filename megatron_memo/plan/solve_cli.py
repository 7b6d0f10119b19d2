"""``megatron-memo solve IN.csv``: lays out any buffers with known lifetimes, with proof.

Exit status: 0 solved, 2 broken input, 3 proven infeasible, 4 no solution in time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_memo.cli_help import HelpFormatter
from megatron_memo.exit_status import Exit

from .cli_parts import (
    add_search_arguments,
    check_output,
    note_slow_solvers,
    terminate_as_interrupt,
    whole_number,
    worker_count,
)
from .minimalloc_csv import read_problem, write_solution
from .portfolio import Solution, Status, solve
from .problem import Problem, ProblemError

HELP = "Lay out buffers with known lifetimes (a MiniMalloc CSV file) in as little memory as can be."
EXIT = {
    Status.SOLVED: Exit.DONE,
    Status.INFEASIBLE: Exit.INFEASIBLE,
    Status.UNSOLVED: Exit.UNFINISHED,
}
_EPILOG = """\
examples: the least peak; whether a layout fits 1 MiB

  megatron-memo solve buffers.csv -o layout.csv
  megatron-memo solve buffers.csv --capacity 1048576 --time-limit 300

Ctrl-C ends the search and keeps the best layout found so far.

Exit status: 0 solved, 2 broken input, 3 proven that no layout fits the capacity, 4 no solution in
time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `solve`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "input",
        metavar="IN.csv",
        type=Path,
        help="buffers, one a line, with the columns id,lower,upper,size: alive from time lower to "
        "time upper (not included), integers",
    )
    parser.add_argument(
        "--capacity",
        metavar="N",
        type=whole_number,
        help="stop at the first layout that needs at most N; without it the lowest peak is wanted "
        "and the search ends when the peak equals the proven lower bound",
    )
    add_search_arguments(parser, "layout")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT.csv",
        type=Path,
        help="where to write id,lower,upper,size,offset; the file appears whole or not at all",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object instead of text"
    )


def run(args: argparse.Namespace) -> int:
    """Reads, solves, verifies, writes and prints; returns the exit status."""
    try:
        with terminate_as_interrupt():
            return _run(args)
    except ValueError as error:
        print(f"megatron-memo solve: error: {error}", file=sys.stderr)
        return Exit.MISTAKE
    except KeyboardInterrupt:
        print("megatron-memo solve: interrupted before the search began", file=sys.stderr)
        return EXIT[Status.UNSOLVED]


def _run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_output([args.input], args.output)
    problem = read_problem(args.input, args.capacity)
    note_slow_solvers("megatron-memo solve")
    solution = solve(
        problem,
        time_limit=args.time_limit,
        workers=worker_count(args),
        seed=args.seed,
        deterministic=args.deterministic,
    )
    # A layout above the capacity is no solution; it is written only where the user broke off and
    # would otherwise lose it.
    keep = solution.status is Status.SOLVED or (solution.interrupted and solution.best is not None)
    written = None
    if args.output is not None and keep and solution.best is not None:
        try:
            write_solution(args.output, problem, solution.best.offsets)
        except OSError as error:
            raise ProblemError(f"{args.output}: {error.strerror or error}") from error
        written = str(args.output)
    if args.json:
        print(json.dumps(as_json(problem, solution, written), indent=2))
    else:
        print("\n".join(as_text(problem, solution, written)))
    return EXIT[solution.status]


def as_json(problem: Problem, solution: Solution, written: str | None) -> dict[str, Any]:
    """What `--json` prints; sizes in the unit of the input."""
    best = solution.best
    return {
        "status": solution.status.value,
        "buffers": len(problem.buffers),
        "capacity": problem.capacity,
        "peak": best.peak if best else None,
        "lower_bound": solution.bound,
        "lower_bound_by": solution.bound_by,
        "gap": solution.gap,
        "optimal": solution.gap == 0,
        "found_by": best.found_by if best else None,
        "found_after_seconds": round(best.seconds, 4) if best else None,
        "seconds": round(solution.seconds, 4),
        "cpu_seconds": round(solution.cpu_seconds, 4),
        "interrupted": solution.interrupted,
        "timed_out": solution.timed_out,
        "compiled": solution.compiled,
        "verified": best is not None,
        "output": written,
    }


def as_text(problem: Problem, solution: Solution, written: str | None) -> list[str]:
    """The same in words."""
    lines = []
    if solution.interrupted:
        lines.append("interrupted: this is the best layout so far")
    elif solution.timed_out:
        lines.append("the time limit was reached")
    best, gap, capacity = solution.best, solution.gap, problem.capacity
    proven = f"proven lower bound {solution.bound} (by {solution.bound_by})"
    count = f"{len(problem.buffers)} buffers"
    if solution.status is Status.INFEASIBLE:
        lines.append(f"infeasible: {count}, capacity {capacity}, {proven}")
    elif best is None or gap is None:
        lines.append(f"no layout found: {count}, {proven}")
    elif solution.status is Status.UNSOLVED:
        lines.append(
            f"no solution in time: {count}, capacity {capacity}, best peak {best.peak}, {proven}"
        )
    else:
        lines.append(f"solved: {count}, peak {best.peak}, {proven}, {_gap_text(gap, solution)}")
    if best is not None and solution.status is not Status.INFEASIBLE:
        lines.append(f"found by {best.found_by} after {best.seconds:.2f} s, verified")
    lines.append(f"took {solution.seconds:.2f} s, {solution.cpu_seconds:.2f} s of CPU time")
    if written is not None:
        above = "" if solution.status is Status.SOLVED else " (it needs more than the capacity)"
        lines.append(f"written to {written}{above}")
    return lines


def _gap_text(gap: int, solution: Solution) -> str:
    if gap == 0:
        return "gap 0: optimal"
    return f"gap {gap} ({gap / solution.bound:.3%})"


def main() -> int:
    """`python -m megatron_memo.plan.solve_cli`, the command by itself."""
    parser = argparse.ArgumentParser(
        prog="megatron-memo solve", description=HELP, formatter_class=HelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
