"""``megatron-memo verify PLAN [TRACE ...]``: checks a plan independently of what made it.

Exit status: 0 right, 2 a file is not there, damaged or foreign, 5 the plan is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_memo.cli_help import HelpFormatter
from megatron_memo.exit_status import Exit
from megatron_memo.profile.trace import read_trace

from .plan_file import digest_of, read_plan
from .verify_plan import WrongPlanError, verify_against, verify_plan

HELP = "Check a memory plan, by itself and against the traces it was made for."
_EPILOG = """\
examples: a plan by itself; a plan and the trace it was made for

  megatron-memo verify plans/rank-0.plan.jsonl
  megatron-memo verify plans/rank-0.plan.jsonl traces/rank-0.trace.jsonl.gz

Checked are: the file's digest; that no two blocks alive at once overlap, that each lies in the
arena and is aligned; that every request that can be planned has a place; that the arena's size and
the bound agree with the entries. With traces also: fingerprint, and that each request has its
entry, in order.

Exit status: 0 right, 2 a file is not there, damaged or foreign, 5 the plan is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `verify`."""
    parser.epilog = _EPILOG
    parser.add_argument("plan", metavar="PLAN", type=Path, help="of `megatron-memo plan`")
    parser.add_argument(
        "traces", metavar="TRACE", nargs="*", type=Path, help="traces that the plan is to cover"
    )


def run(args: argparse.Namespace) -> int:
    """Checks and prints; returns the exit status."""
    try:
        plan = read_plan(args.plan)
        seen = verify_plan(plan)
        print(
            f"{args.plan}: digest, overlap, bounds, alignment and coverage are right: "
            f"{seen.windows} windows, {seen.planned} blocks in {plan.arena} bytes, "
            f"{seen.native} left to the native allocator; {seen.most_alive} bytes alive at most, "
            f"proven bound {plan.bound} (by {plan.bound_by}), gap {plan.gap}"
        )
        for path in args.traces:
            source = verify_against(plan, read_trace(path), digest_of(path))
            print(f"{path}: fingerprint and every request are those of window {source}")
    except WrongPlanError as error:
        print(f"megatron-memo verify: {args.plan} is wrong: {error}", file=sys.stderr)
        return Exit.WRONG
    except ValueError as error:
        print(f"megatron-memo verify: error: {error}", file=sys.stderr)
        return Exit.MISTAKE
    return 0


def main() -> int:
    """`python -m megatron_memo.plan.verify_cli`, the command by itself."""
    parser = argparse.ArgumentParser(
        prog="megatron-memo verify", description=HELP, formatter_class=HelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
