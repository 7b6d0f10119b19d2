#!/usr/bin/env python3
"""Trains one model in several ways for a few iterations each, and prints what each costs.

    .venv/bin/python scripts/compare.py --config configs/quickstart.yaml --data-path data/PREFIX

The ways are those of `VARIANTS` below; each is a run of pretrain_gpt_memo.py on the same data from
the same seed, so their losses can be compared too. Memory is metered in the last iteration, whose
time is not counted; nor is the first one's, which holds what is done once.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.config import read_config
from lib.launch import LaunchError, Machine, launch, stop_on_sigterm, this_machine

_NONE_RESIDENT = ("--memo-resident-layers", "0")

# Name and flags of each way; the first is what the others are compared with.
VARIANTS: dict[str, tuple[str, ...]] = {
    "stock": ("--memo-modules", "memo"),
    "full recompute": (
        *("--memo-modules", "memo", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "memo, ratio 1": ("--memo-swap-ratio", "1", *_NONE_RESIDENT),
    "memo, ratio 0.5": ("--memo-swap-ratio", "0.5", *_NONE_RESIDENT),
    "memo, ratio 0": ("--memo-swap-ratio", "0", *_NONE_RESIDENT),
}

CAPTION = (
    "Iteration time: fastest of {timed} timed, as a ratio to stock. Activations: peak of "
    "one rank above what it holds between iterations. Host: memory of one rank that memo swaps "
    "to. Loss: largest difference to stock in any iteration. Stock keeps everything, with memo's "
    "norm and attention kernel, as all rows have; memo runs with --memo-resident-layers 0 (the "
    "default, 2, keeps two layers on the device). {machine}; {versions}."
)


@dataclass(frozen=True)
class Result:
    """What one way cost. Seconds per iteration, bytes of one rank, losses of all iterations."""

    name: str
    seconds: float
    peak_bytes: int
    host_bytes: int
    losses: tuple[float, ...]

    @classmethod
    def from_report(cls, name: str, report: dict[str, Any]) -> Result:
        """Read from what ``--memo-report`` wrote.

        Raises:
            ValueError: no iteration was timed, or none was metered.
        """
        iterations = report["iterations"]
        timed = [entry["seconds"] for entry in iterations[1:] if not entry["metered"]]
        if not timed or report["peak_activation_bytes"] is None:
            raise ValueError(f"{name}: the run was too short to time and to meter an iteration")
        return cls(
            name=name,
            seconds=min(timed),
            peak_bytes=report["peak_activation_bytes"],
            host_bytes=report["swap"]["host_bytes"] if report["swap"] else 0,
            losses=tuple(entry["lm_loss"] for entry in iterations),
        )

    def loss_difference(self, other: Result) -> float:
        """Largest difference of the losses of one iteration."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


def compare(
    machine: Machine, flags: Sequence[str], *, iterations: int, folder: Path
) -> tuple[list[Result], dict[str, str]]:
    """Run every way; returns the results in order, and the versions they were measured with."""
    own = ["--train-iters", str(iterations), "--memo-measure-memory", str(iterations)]
    # Nothing but training: no evaluation, and a schedule that does not warm up beyond the end.
    own += ["--eval-iters", "0", "--lr-warmup-iters", "0"]
    results, versions = [], {}
    for name, variant in VARIANTS.items():
        print(f"== {name}: {' '.join(variant)}", flush=True)
        stem = name.replace(", ", "-").replace(" ", "-")
        report = launch(
            machine,
            [*flags, *own, *variant],
            log=folder / f"{stem}.log",
            report=folder / f"{stem}.json",
        )
        results.append(Result.from_report(name, report))
        versions = report["versions"]
    return results, versions


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table; ratios are to the first."""
    stock = results[0]
    rows = [("", "iteration time", "peak activations", "host memory", "loss difference")]
    for result in results:
        rows.append(
            (
                result.name,
                f"{result.seconds / stock.seconds:.2f}x ({result.seconds:.2f} s)",
                f"{result.peak_bytes / 1e6:.1f} MB ({result.peak_bytes / stock.peak_bytes:.2f}x)",
                f"{result.host_bytes / 1e6:.1f} MB",
                _loss_cell(result, stock),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _loss_cell(result: Result, stock: Result) -> str:
    if result is stock:
        return ""
    difference = result.loss_difference(stock)
    return f"{difference:.1e}" if difference else "none"


def caption(machine: Machine, versions: dict[str, str], iterations: int) -> str:
    """How the table was measured."""
    return CAPTION.format(
        timed=iterations - 2,
        machine=machine.says,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )


def write_csv(path: Path, results: Sequence[Result], note: str) -> None:
    """The numbers of the table, unrounded, with how they were measured in the first line."""
    with open(path, "w", newline="") as file:
        file.write(f"# {note}\n")
        rows = csv.writer(file)
        rows.writerow(["variant", "seconds", "time_ratio", "peak_bytes", "host_bytes", "losses"])
        for result in results:
            ratio = result.seconds / results[0].seconds
            row = [result.name, result.seconds, ratio, result.peak_bytes, result.host_bytes]
            rows.writerow([*row, json.dumps(result.losses)])


def run(machine: Machine, flags: Sequence[str], *, iterations: int, folder: Path) -> None:
    """Compare and print; leaves logs, reports and ``compare.csv`` in ``folder``."""
    results, versions = compare(machine, flags, iterations=iterations, folder=folder)
    note = caption(machine, versions, iterations)
    write_csv(folder / "compare.csv", results, note)
    print(f"\n{table(results)}\n\n{textwrap.fill(note, 100)}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Flags it does not know go to Megatron."""
    parser = argparse.ArgumentParser(
        description="Trains one model stock, with full recompute and with memo at three ratios, a "
        "few iterations each, and prints time, memory and loss of each in one table. Further "
        "flags are Megatron's, as --data-path and --seq-length.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="Config of the model (configs/README.md)."
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=4,
        help="Iterations of each run: the first is not timed, the last is metered (default 4).",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/compare"),
        help="Where logs, reports and compare.csv go (default runs/compare).",
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.iterations < 3:
        parser.error(
            f"--iterations {arguments.iterations} is too small: it has to be at least 3, one to "
            "warm up, one to time, one to meter"
        )
    stop_on_sigterm()
    try:
        run(
            this_machine(),
            read_config(arguments.config).flags(rest),
            iterations=arguments.iterations,
            folder=arguments.folder,
        )
    except (LaunchError, ValueError, OSError) as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncompare.py: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
