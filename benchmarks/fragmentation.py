#!/usr/bin/env python3
"""What PyTorch's allocator would reserve for traces, and what a plan needs: a table, and a CSV.

    python benchmarks/fragmentation.py TRACE [TRACE ...] [--time-limit 60] [--csv OUT.csv]

Traces of the paper's models are those of `benchmarks/profile_models.py --traces FOLDER`.
Every trace is planned by itself and verified. `native` and `expandable` are simulations of the
caching allocator, with default settings and with expandable segments, over the same requests,
iteration after iteration until nothing more is reserved. All three are divided by `bound`, the
proven lower bound of any layout: 1.000 is a perfect fit. Without a trace, made-up ones of 32 and 80
layers stand in: python benchmarks/fragmentation.py --made-up
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.plan_file import digest_of
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.savings import savings_of
from megatron_memo.profile.trace import read_trace

COLUMNS = (
    *("trace", "requests", "planned", "bound_gib", "native", "expandable", "plan"),
    *("gap", "found_by", "seconds"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path, help="of megatron-memo profile")
    parser.add_argument("--made-up", action="store_true", help="made-up traces instead of files")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds a plan (default 60)")
    parser.add_argument("--workers", type=int, default=2, help="threads of a search (default 2)")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    if bool(args.traces) == args.made_up:
        parser.error("give traces, or --made-up")
    rows = []
    for source in made_up() if args.made_up else read(args.traces):
        rows.append(measure(source, args))
        if len(rows) == 1:
            print(*COLUMNS, sep="\t")
        print(*(rows[-1][column] for column in COLUMNS), sep="\t", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as stream:
            given = "--made-up" if args.made_up else "TRACE ..."
            stream.write(
                f"# python benchmarks/fragmentation.py {given} --time-limit {args.time_limit:g} "
                f"--workers {args.workers}\n# {os.cpu_count()} cores, {platform.machine()}\n"
            )
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


def read(paths: list[Path]) -> Iterator[Source]:
    for path in paths:
        yield Source("/".join(path.parts[-2:]), digest_of(path), read_trace(path))


def made_up() -> Iterator[Source]:
    for layers, chunks in ((32, 1), (32, 4), (80, 8)):
        for keep in ("all", "swap", "input"):
            for jitter in (0.0, 0.3):
                shape = Shape(layers, chunks, keep, jitter=jitter)
                name = f"{layers} layers, {chunks} chunks, keep {keep}, +-{jitter:.0%}"
                yield Source(name, "made up", training(shape))


def measure(source: Source, args: argparse.Namespace) -> dict[str, object]:
    """The row of one trace."""
    planned = make_plan([source], Search(args.time_limit, args.workers))
    plan, requests = planned.plan, planned.requests[0]
    savings = savings_of([requests])
    return {
        "trace": source.name,
        "requests": len(requests.requests),
        "planned": len(requests.planned),
        "bound_gib": round(plan.bound / 2**30, 3),
        "native": f"{savings.native / plan.bound:.3f}",
        "expandable": f"{savings.expandable / plan.bound:.3f}",
        "plan": f"{plan.arena / plan.bound:.3f}",
        "gap": plan.gap,
        "found_by": plan.found_by,
        "seconds": round(planned.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
