"""``megatron-memo diff A B``: where two traces part, in plain words."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Say where two traces part: in which event, in which phase, and by how much."
EXIT_EQUAL, EXIT_DIFFERENT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `diff`."""
    parser.epilog = (
        "Traces are equal if they ask for the same sizes and give the same blocks back, in the "
        "same order. Exit status: 0 equal, 1 different, 2 broken input."
    )
    parser.add_argument("a", metavar="A", type=Path, help="a trace (*.trace.jsonl, or .gz)")
    parser.add_argument("b", metavar="B", type=Path, help="the trace to compare with it")


def run(args: argparse.Namespace) -> int:
    """Reads, compares and prints; returns the exit status."""
    from .difference import compare, explain
    from .trace import read_trace

    found = compare(read_trace(args.a), read_trace(args.b))
    print("\n".join(explain(found)))
    return EXIT_EQUAL if found.equal else EXIT_DIFFERENT
