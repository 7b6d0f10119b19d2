#!/usr/bin/env python3
"""Measures `megatron-memo solve` on a folder of CSV files: a table, and a CSV with --csv.

    python benchmarks/dsa.py FOLDER [--capacity N] [--runs 5] [--time-limit 10] [--csv OUT.csv]

Every run is a process of its own, start of Python included; its CPU time is what is reported, the
median over the runs, because wall time says little on a shared machine. Layouts are read back from
the written file and verified. The compiled solvers are built before the first run.

A number in a file's name (`A.1048576.csv`) is its capacity unless --capacity says otherwise.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_memo.plan import native
from megatron_memo.plan.verify import verify_layout

COLUMNS = (
    *("file", "buffers", "capacity", "status", "peak", "lower_bound", "gap", "verified"),
    *("cpu_seconds_median", "cpu_seconds_max", "wall_seconds_median", "found_by"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="CSV files, or one of them")
    parser.add_argument(
        "--capacity", type=int, help="for every file; 0: none, seek the lowest peak"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each file (default 5)")
    parser.add_argument("--time-limit", type=float, default=10, help="seconds a run (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="threads of a run (default 2)")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.csv")) if args.folder.is_dir() else [args.folder]
    if not files:
        parser.error(f"{args.folder}: no CSV files")
    if native.library() is None:
        print(f"note: without compiled solvers: {native.why_not()}", file=sys.stderr)
    rows = []
    for file in files:
        rows.append(measure(file, args))
        if len(rows) == 1:
            print(*COLUMNS, sep="\t")
        print(*(rows[-1][column] for column in COLUMNS), sep="\t", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as stream:
            command = " ".join(["python benchmarks/dsa.py", *sys.argv[1:]])
            stream.write(f"# {command}\n# {machine()}\n")
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


def measure(file: Path, args: argparse.Namespace) -> dict[str, object]:
    """The row of one file."""
    capacity = args.capacity
    if capacity is None:
        numbers = [part for part in file.name.split(".")[1:-1] if part.isdigit()]
        capacity = int(numbers[0]) if numbers else 0
    cpu, wall, said = [], [], {}
    verified = True
    for run in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.csv"
            command = [sys.executable, "-m", "megatron_memo.plan.solve_cli", str(file.resolve())]
            command += ["--json", "-o", str(out), "--time-limit", str(args.time_limit)]
            command += ["--seed", str(run), "--workers", str(args.workers)]
            command += ["--capacity", str(capacity)] if capacity else []
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1]
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if not done.stdout:
                sys.exit(f"{file}: {done.stderr}")
            said = json.loads(done.stdout)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            wall.append(said["seconds"])
            verified = verified and verify_file(out, capacity)
    return {
        "file": file.name,
        "buffers": said["buffers"],
        "capacity": capacity or "",
        "status": said["status"],
        "peak": said["peak"],
        "lower_bound": said["lower_bound"],
        "gap": said["gap"],
        "verified": verified,
        "cpu_seconds_median": round(statistics.median(cpu), 2),
        "cpu_seconds_max": round(max(cpu), 2),
        "wall_seconds_median": round(statistics.median(wall), 2),
        "found_by": said["found_by"],
    }


def verify_file(path: Path, capacity: int) -> bool:
    """Whether the written layout is there and right (a wrong one raises)."""
    if not path.exists():
        return False
    with open(path, newline="") as stream:
        rows = list(csv.DictReader(stream))
    columns = [[int(row[name]) for row in rows] for name in ("lower", "upper", "size", "offset")]
    verify_layout([row["id"] for row in rows], *columns, capacity=capacity or None)
    return True


def machine() -> str:
    """Processor, cores and Python."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as stream:
            name = next(
                (line.split(":")[1].strip() for line in stream if "model name" in line), name
            )
    except OSError:
        pass  # not Linux: the short name has to do
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
