"""``megatron-memo diff A B``: where two traces part, in plain words."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_memo.exit_status import Exit

HELP = "Say where two traces part: in which event, in which phase, and by how much."
_EPILOG = """\
examples: two runs of one rank; a profile and what a run recorded

  megatron-memo diff monday/rank-0.trace.jsonl.gz tuesday/rank-0.trace.jsonl.gz
  megatron-memo diff profiled.trace.jsonl.gz recorded.trace.jsonl.gz

Traces are equal if they ask for the same sizes and give the same blocks back, in the same order.

Exit status: 0 equal, 1 different, 2 broken input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `diff`."""
    parser.epilog = _EPILOG
    parser.add_argument("a", metavar="A", type=Path, help="a trace (*.trace.jsonl, or .gz)")
    parser.add_argument("b", metavar="B", type=Path, help="the trace to compare with it")


def run(args: argparse.Namespace) -> int:
    """Reads, compares and prints; returns the exit status."""
    from .difference import compare, explain
    from .trace import read_trace

    found = compare(read_trace(args.a), read_trace(args.b))
    print("\n".join(explain(found)))
    return Exit.DONE if found.equal else Exit.NO
