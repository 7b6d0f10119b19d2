"""``megatron-memo lr-scale``: the learning rate for another batch."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_memo.lr_scale.formula import relative_rate, relative_steps, relative_tokens
from megatron_memo.lr_scale.megatron_log import best_of_batches, read_log
from megatron_memo.lr_scale.noise_scale import Estimate, from_rates, from_runs, largest_rate
from megatron_memo.lr_scale.words import (
    parse_number,
    parse_rate,
    parse_run,
    parse_tokens,
    parse_whole,
    tokens_words,
)

HELP = "The learning rate for another batch, by the law for Adam-like optimizers."

# Beyond these a result is given with a note. All are our judgement, no result of the paper.
FAR = 4.0  # times the largest known batch, or below the smallest
ABOVE = 3.0  # times B_noise
LARGE_MISFIT = 0.15
SMOOTH = 10

_EXAMPLE = """\
A longer context puts more tokens into each step, and the best learning rate follows the batch:

    lr = 2 * lr_max / (sqrt(B_noise / B) + sqrt(B / B_noise))

B is the batch in tokens. The rate rises as sqrt(B), is largest at B_noise, and falls from there.
Source: Li et al. 2024, arXiv 2405.14578; for optimizers whose steps go by the sign of the gradient
in the limit of much noise (Adam, AdamW, Lion), not for SGD.

examples:
  rates were scanned at batches of 0.5M and 2M tokens; which for 64 sequences of 128Ki tokens?
    megatron-memo lr-scale --rate 0.5M:2e-4 --rate 2M:3e-4 --spacing 1.5 --batch 64x128Ki
  runs to one loss took 40000 steps with 20G tokens and 25000 steps with 50G tokens
    megatron-memo lr-scale --run 40000:20G --run 25000:50G --rate 0.5M:2e-4 --batch 8M
  logs of a scan, several learning rates at each of several batches
    megatron-memo lr-scale --log runs/*.log --target-loss 2.6 --batch 64x128Ki

Where B_noise comes from, one of:
  --noise    you know it
  --run, two or more: steps = steps_min * (1 + B_noise / B) for runs to one loss, each at its
             batch's best rate. Rates that are a little off matter little here.
  --log, two or more: the same from Megatron's logs; of each batch the run that needs fewest steps
  --rate, two or more: the law itself through the best rates. They need a fine scan: see --spacing.
Gradient norms at two batch sizes are not used: they give SGD's noise scale, which is another one.

Limits. B_noise grows while the loss falls: use runs to the loss that you care about. It depends on
model and data, and tokens of one long sequence may be worth less than as many of several. Far above
B_noise measured rates often level off where the law falls. Warm-up, decay and weight decay are
outside of the law.
Sizes of batches: 4194304, 4M (10^6), 4Mi (2^20), or 128x32Ki (sequences x tokens of each).

Exit status: 0, or 2 after a mistake of yours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "--batch", metavar="BATCH", nargs="+", default=[], help="whose learning rate is wanted"
    )
    parser.add_argument(
        "--rate",
        metavar="BATCH:LR",
        action="append",
        default=[],
        help="a batch and its best learning rate (repeatable)",
    )
    parser.add_argument("--noise", metavar="BATCH", help="B_noise, if you know it")
    parser.add_argument(
        "--run",
        metavar="STEPS:TOKENS",
        dest="runs",
        action="append",
        default=[],
        help="what a run took to reach the loss that all runs here reached (repeatable)",
    )
    parser.add_argument(
        "--log", metavar="FILE", nargs="+", default=[], type=Path, help="logs of Megatron runs"
    )
    parser.add_argument(
        "--target-loss", metavar="LOSS", help="the loss at which the runs of --log are compared"
    )
    parser.add_argument(
        "--smooth",
        metavar="N",
        help=f"a run of --log has a loss when the mean of N logged ones has it (default {SMOOTH})",
    )
    parser.add_argument(
        "--seq-length", metavar="TOKENS", help="of --log, where the logs do not list the arguments"
    )
    parser.add_argument(
        "--spacing",
        metavar="FACTOR",
        help="between neighbouring rates of the scan that found --rate; gives the range in which "
        "B_noise lies, as each best rate is known to the square root of it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of text"
    )


@dataclass
class _Known:
    """What is known, and how."""

    noise: float
    source: str
    rates: list[tuple[float, float]]
    batches: list[float]
    estimate: Estimate | None = None
    notes: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Estimate and print; returns the exit status.

    Raises:
        ValueError: a mistake of the user's.
    """
    wanted = [parse_tokens("--batch", text) for text in args.batch]
    known = _known(args)
    lr_max = largest_rate(known.rates, known.noise) if known.rates else None
    _add_notes(known, wanted)
    rows = [_row(batch, known.noise, lr_max) for batch in wanted]
    if args.json:
        print(json.dumps(_as_json(known, lr_max, rows), indent=2))
    else:
        print("\n".join(_as_text(known, lr_max, rows)))
    return 0


def _known(args: argparse.Namespace) -> _Known:
    rates = [parse_rate(text) for text in args.rate]
    given = {"--noise": args.noise, "--run": args.runs, "--log": args.log}
    sources = [flag for flag, value in given.items() if value]
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)}: each tells B_noise. Give one of them.")
    spacing = None if args.spacing is None else parse_number("--spacing", args.spacing, above=1.0)
    if spacing is not None and (sources or len(rates) < 2):
        raise ValueError(
            f"--spacing {args.spacing}: has an effect only where B_noise comes from two or more "
            "--rate. Drop it."
        )
    for name in ("target_loss", "smooth", "seq_length"):
        flag, text = f"--{name.replace('_', '-')}", getattr(args, name)
        if text is not None and not args.log:
            raise ValueError(f"{flag} {text}: has an effect only with --log. Drop it.")
    batches = [batch for batch, _ in rates]
    if args.noise:
        return _Known(parse_tokens("--noise", args.noise), "given", rates, batches)
    if args.runs:
        runs = [parse_run(text) for text in args.runs]
        estimate = _told("--run", from_runs, runs)
        source = f"from steps and tokens of {estimate.runs} runs"
        return _Known(
            estimate.noise, source, rates, [tokens / steps for steps, tokens in runs], estimate
        )
    if args.log:
        return _from_logs(args, rates)
    if len(rates) < 2:
        raise ValueError(
            "B_noise is not known: give --noise BATCH, two --run STEPS:TOKENS, two --log FILE, or "
            "best rates of two batches by --rate BATCH:LR (--help has examples)."
        )
    estimate = _told("--rate", from_rates, rates, spacing)
    source = f"from the best rates of {estimate.runs} batches"
    return _Known(estimate.noise, source, rates, batches, estimate)


def _from_logs(args: argparse.Namespace, rates: list[tuple[float, float]]) -> _Known:
    if args.target_loss is None:
        raise ValueError(
            "--log: runs are compared at one loss that each has reached. Give --target-loss LOSS."
        )
    loss = parse_number("--target-loss", args.target_loss, above=0.0)
    smooth = SMOOTH if args.smooth is None else parse_whole("--smooth", args.smooth)
    length = None if args.seq_length is None else parse_whole("--seq-length", args.seq_length)
    best = best_of_batches([read_log(path, length) for path in args.log], loss, smooth)
    estimate = _told("--log", from_runs, [(b.steps, float(b.steps * b.batch)) for b in best])
    notes = [
        f"at {tokens_words(b.batch)} tokens {b.rate:g} is the best of {b.tried} learning "
        f"rate{'s' * (b.tried > 1)}, and none beyond it was tried; if a better one exists, B_noise "
        "is off"
        for b in best
        if b.at_edge
    ]
    found = rates or [(float(b.batch), b.rate) for b in best]
    source = f"from steps to a loss of {loss:g} of {estimate.runs} batches in {len(args.log)} logs"
    return _Known(estimate.noise, source, found, [float(b.batch) for b in best], estimate, notes)


def _told(flag: str, estimate: Any, *values: Any) -> Estimate:
    """What a function of `noise_scale` says, its errors with the flag before them."""
    try:
        return estimate(*values)
    except ValueError as reason:
        raise ValueError(f"{flag}: {reason}") from None


def _add_notes(known: _Known, wanted: list[float]) -> None:
    if known.estimate is not None and known.estimate.misfit > LARGE_MISFIT:
        known.notes.append(
            f"the law misses one of the runs by {known.estimate.misfit:.0%}, so take B_noise as an "
            "order of magnitude; were all rates the best of their batch?"
        )
    for batch in wanted:
        if known.batches and not (min(known.batches) / FAR <= batch <= max(known.batches) * FAR):
            known.notes.append(
                f"{tokens_words(batch)} tokens is more than {FAR:g} times away from the batches "
                "that this rests on"
            )
    if any(batch > ABOVE * known.noise for batch in wanted):
        known.notes.append(
            "above B_noise measured rates often fall more slowly than the law or level off, up to "
            "lr_max; the law's rate is the careful choice"
        )


def _row(batch: float, noise: float, lr_max: float | None) -> dict[str, Any]:
    return {
        "batch": batch,
        "learning_rate": None if lr_max is None else lr_max * relative_rate(batch, noise),
        "relative_rate": relative_rate(batch, noise),
        "relative_steps": relative_steps(batch, noise),
        "relative_tokens": relative_tokens(batch, noise),
    }


def _as_json(known: _Known, lr_max: float | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Batches in tokens. A bound that there is none of is null."""
    estimate = known.estimate
    ranged = estimate is not None and estimate.low is not None and estimate.high is not None
    bounds = (estimate.low or None, estimate.high) if ranged and estimate else (None, None)
    return {
        "noise": known.noise,
        "source": known.source,
        "misfit": None if estimate is None else estimate.misfit,
        "noise_low": bounds[0],
        "noise_high": None if bounds[1] == math.inf else bounds[1],
        "lr_max": lr_max,
        "batches": rows,
        "notes": known.notes,
    }


def _as_text(known: _Known, lr_max: float | None, rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"B_noise {tokens_words(known.noise)} tokens, {known.source}"]
    estimate = known.estimate
    if estimate is not None and estimate.runs > 2:
        lines[0] += f", which the law fits within {estimate.misfit:.1%}"
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        low = "0" if estimate.low == 0 else tokens_words(estimate.low)
        high = "no bound" if estimate.high == math.inf else tokens_words(estimate.high)
        lines.append(f"  as precise as the scan: {low} to {high}")
    if lr_max is not None:
        lines.append(f"lr_max {lr_max:.3g}, the best learning rate at that batch")
    if rows:
        lines += ["", f"{'batch':>12} {'learning rate':>14} {'steps':>8} {'tokens':>8}"]
        for row in rows:
            rate = row["learning_rate"]
            shown = f"{row['relative_rate']:.3f} lr_max" if rate is None else f"{rate:.3g}"
            lines.append(
                f"{tokens_words(row['batch']):>12} {shown:>14} {row['relative_steps']:>7.2f}x "
                f"{row['relative_tokens']:>7.2f}x"
            )
        lines.append("steps and tokens to a given loss, relative to the fewest of any batch")
    lines += [f"note: {note}" for note in known.notes]
    return lines
