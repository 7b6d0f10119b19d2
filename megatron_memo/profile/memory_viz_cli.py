"""``megatron-memo export-snapshot PLAN -o FILE.pickle``: a plan for PyTorch's memory viewer."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Write a memory plan as a memory snapshot of PyTorch, to look at in its memory viewer."

_EPILOG = """\
examples: the fullest window of a plan; the second one

  megatron-memo export-snapshot plans/rank-0.plan.jsonl -o plan.pickle
  megatron-memo export-snapshot plans/rank-0.plan.jsonl -o plan.pickle --window 1

Drop the file on https://pytorch.org/memory_viz, or give it to python -m torch.cuda._memory_viz.
Each planned request is a block of one segment, the arena, and is named by its phase, as in 'layer 3
chunk 1 backward of micro-batch 0'. Addresses are made up; offsets in the arena are the plan's. Left
out are requests that the native allocator serves and finds a place for: those that outlive the
iteration, of other streams, or below the plan's smallest size. At the end of the history the arena
is empty again: look at the timeline or the allocator state history.

Exit status: 0 written, 2 broken input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `export-snapshot`."""
    parser.epilog = _EPILOG
    parser.add_argument("plan", metavar="PLAN", type=Path, help="of `megatron-memo plan`")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.pickle",
        type=Path,
        required=True,
        help="where to write the snapshot",
    )
    parser.add_argument(
        "--window",
        metavar="N",
        type=int,
        help="which of the plan's windows, counted from 0 (default: the one that needs most of the "
        "arena)",
    )


def run(args: argparse.Namespace) -> int:
    """Reads, writes and says what is shown; returns the exit status."""
    from megatron_memo.plan.cli_parts import check_output
    from megatron_memo.plan.plan_file import PlanError, load_plan

    from .memory_viz import export_snapshot, fullest_window, shown

    check_output([args.plan], args.output)
    plan = load_plan(args.plan)
    number = fullest_window(plan) if args.window is None else args.window
    try:
        seen = shown(plan, number)
    except PlanError as error:
        raise PlanError(f"{args.plan}: {error}") from None
    export_snapshot(args.output, plan, number, args.plan.name)
    for note in seen.notes(plan):
        print(note)
    print(f"written to {args.output}: open it at https://pytorch.org/memory_viz")
    return 0
