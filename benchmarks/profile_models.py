#!/usr/bin/env python3
"""Measures `megatron-memo profile` on the models of the MEMO paper and Llama-3-70B at 1M tokens.

    python benchmarks/profile_models.py [MODEL ...] [--pp 1 4] [--csv OUT.csv] [--traces FOLDER]

One rank a pipeline stage (the first of its tensor-parallel group), each in a process of its own,
start of Python included. Reported are wall and CPU seconds and the process's peak of memory.
Bytes are GiB of one rank: `peak` of the iteration's own requests, above `held` (parameters,
gradients, optimizer). `ratio` is that of MEMO's own program with 2 TiB of host memory for eight
GPUs (`models.paper_ratio`); 0 where even that would not be enough.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import MODELS, flags, paper_ratio
from megatron_memo.profile.trace import read_trace

COLUMNS = (
    *("model", "tp", "pp", "rank", "ratio", "events", "peak_gib", "held_gib", "wall_seconds"),
    *("cpu_seconds", "rss_gb"),
)
GIB = 2**30
TP = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="default: all")
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 4], help="pipeline stages")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--traces", type=Path, help="keep the traces here")
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        parser.error(f"{unknown[0]}: not one of {', '.join(MODELS)}")
    print(*COLUMNS, sep="\t")
    rows = []
    for name in args.models:
        for pp in args.pp:
            for stage in range(pp):
                rows.append(measure(name, pp, stage * TP, args.traces))
                print(*rows[-1].values(), sep="\t", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
    return 0


def measure(name: str, pp: int, rank: int, keep: Path | None) -> dict[str, object]:
    """Profiles one rank; a row of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if keep is None else keep / f"{name}-pp{pp}"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        # A child in between, so that the peak of memory is this run's and not an earlier one's.
        report = subprocess.run(
            [
                *(sys.executable, "-c", _MEASURED, sys.executable, "-m", "megatron_memo.cli"),
                *("profile", "--rank", str(rank), "-o", str(folder), "--"),
                *flags(name, tp=TP, pp=pp, micro_batches=pp),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        trace = read_trace(folder / f"rank-{rank}.trace.jsonl.gz")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    values = (
        *(name, TP, pp, rank, paper_ratio(name), len(trace.events)),
        round(trace.peak() / GIB, 2),
        round(sum(block.size for block in trace.held) / GIB, 2),
        round(wall, 1),
        round(cpu, 1),
        round(int(report.stdout.split()[-1]) * 1024 / 1e9, 2),
    )
    return dict(zip(COLUMNS, values, strict=True))


_MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


if __name__ == "__main__":
    sys.exit(main())
