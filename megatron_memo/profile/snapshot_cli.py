"""``megatron-memo import-snapshot FILE.pickle -o TRACE``: a run that was recorded, as a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Make a trace from a memory snapshot of PyTorch, to plan or compare a run you already have."

_EPILOG = """\
examples: the last whole iteration; device 3's; a part of the history

  megatron-memo import-snapshot snapshot.pickle -o rank-0.trace.jsonl.gz
  megatron-memo import-snapshot snapshot.pickle -o rank-3.trace.jsonl.gz --device 3
  megatron-memo import-snapshot snapshot.pickle -o part.trace.jsonl --from 12000 --to 24000

To record one: torch.cuda.memory._record_memory_history() before training,
torch.cuda.memory._dump_snapshot('FILE.pickle') after three or more iterations. Nothing in the
pickle is run.

Exit status: 0 written, 2 broken input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `import-snapshot`."""
    parser.epilog = _EPILOG
    parser.add_argument("snapshot", metavar="FILE.pickle", type=Path, help="the snapshot")
    parser.add_argument(
        "-o",
        "--output",
        metavar="TRACE",
        type=Path,
        required=True,
        help="where to write the trace: *.trace.jsonl, or *.trace.jsonl.gz for a packed one",
    )
    parser.add_argument(
        "--device", metavar="N", type=int, help="whose requests, if several devices were recorded"
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="EVENT",
        type=int,
        help="first event to take, counted from 0 in the device's history; without --from and --to "
        "the last full iteration is found by itself",
    )
    parser.add_argument(
        "--to", dest="stop", metavar="EVENT", type=int, help="the event after the last to take"
    )


def run(args: argparse.Namespace) -> int:
    """Reads, writes and says what was taken; returns the exit status."""
    from .snapshot import SnapshotError, import_snapshot
    from .trace import Malloc, rounded, write_trace

    source, target = args.snapshot, args.output
    if source.exists() and target.exists() and source.samefile(target):
        raise SnapshotError(f"-o {target}: this is the snapshot itself. Name another file")
    trace = import_snapshot(source, device=args.device, start=args.start, stop=args.stop)
    try:
        write_trace(target, trace)
    except OSError as error:
        raise SnapshotError(f"-o {target}: {error.strerror or error}") from error
    requests = sum(isinstance(event, Malloc) for event in trace.events)
    held = sum(rounded(block.size, trace.header.rounding) for block in trace.held)
    for note in trace.header.notes:
        print(note)
    print(
        f"{requests} requests with a peak of {trace.peak():,} bytes, above {len(trace.held)} "
        f"blocks of {held:,} bytes that were there before"
    )
    print(f"written to {target}")
    return 0
