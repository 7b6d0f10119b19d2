"""What a Megatron log tells of a run: its batch, its learning rate, and when it reached a loss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Megatron's progress line. Several ranks write to one log, so it may not start its line.
_ITERATION = re.compile(
    r"iteration +(?P<step>\d+)/ *\d+ \| consumed samples: +(?P<samples>\d+) \|.*?"
    r"learning rate: (?P<rate>[^ |]+) \| global batch size: +(?P<batch>\d+) \|.*?"
    r"lm loss: (?P<loss>[^ |]+)"
)
# From the list of arguments that Megatron prints at its start.
_SEQUENCE = re.compile(r"^ *(?:\S+ +)?seq_length \.+ (\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class LoggedRun:
    """One run.

    Attributes:
        path: the log.
        batch: tokens of a step.
        rate: its largest learning rate.
        steps: of each progress line.
        losses: of each progress line; Megatron averages over the lines' interval.
    """

    path: Path
    batch: int
    rate: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]

    def steps_to(self, loss: float, smooth: int) -> int | None:
        """The first step at which the mean of the last `smooth` logged losses is at most `loss`.

        None if it never is.

        Raises:
            ValueError: it is from the start, which says nothing of the steps that it takes.
        """
        for end in range(smooth, len(self.losses) + 1):
            if sum(self.losses[end - smooth : end]) <= loss * smooth:
                if end == smooth:
                    raise ValueError(
                        f"--target-loss {loss:g}: {self.path} is there from its first {smooth} "
                        "logged losses on, which tells nothing. Give a lower loss, or a smaller "
                        "--smooth."
                    )
                return self.steps[end - 1]
        return None


def read_log(path: Path, sequence: int | None = None) -> LoggedRun:
    """Read the output of a Megatron run; of several in one file the steps follow one another.

    Args:
        path: what the rank that logs (torchrun's whole output will do) has printed.
        sequence: tokens of a sequence; None reads them from the log.

    Raises:
        ValueError: unreadable, no progress lines, a batch that changes, or no sequence length.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--log {path}: cannot be read ({error.strerror or error}).") from None
    found = [match.groupdict() for match in _ITERATION.finditer(text)]
    if not found:
        raise ValueError(
            f"--log {path}: holds no progress line of Megatron ('iteration N/M | consumed samples: "
            "... | lm loss: ...'). Give the run's output, of the rank that logs."
        )
    samples = {int(line["batch"]) for line in found}
    if len(samples) > 1:
        raise ValueError(
            f"--log {path}: the global batch size changes ({min(samples)} to {max(samples)} "
            "sequences), and the law holds for one batch. Give runs without --rampup-batch-size."
        )
    lengths = {int(length) for length in _SEQUENCE.findall(text)}
    if sequence is None and len(lengths) != 1:
        what = "several sequence lengths" if lengths else "no list of arguments with seq_length"
        raise ValueError(f"--log {path}: holds {what}. Give --seq-length TOKENS.")
    length = lengths.pop() if sequence is None else sequence
    # A resumed run repeats the steps after its checkpoint; the later account counts.
    steps: dict[int, float] = {}
    for line in found:
        steps[int(line["step"])] = float(line["loss"])
    ordered = sorted(steps)
    return LoggedRun(
        path,
        samples.pop() * length,
        max(float(line["rate"]) for line in found),
        tuple(ordered),
        tuple(steps[step] for step in ordered),
    )


@dataclass(frozen=True)
class BatchBest:
    """The run of one batch that reached the loss in the fewest steps.

    Attributes:
        batch: tokens of a step.
        rate: its learning rate.
        steps: to the loss.
        tried: how many different rates its batch was run with.
        at_edge: it has the lowest or highest of these, so that the best may lie beyond.
    """

    batch: int
    rate: float
    steps: int
    tried: int
    at_edge: bool


def best_of_batches(runs: Sequence[LoggedRun], loss: float, smooth: int) -> list[BatchBest]:
    """The best run of each batch, by batch.

    A run that never reaches the loss is left out where another of its batch does.

    Raises:
        ValueError: no run of a batch reaches it, or one is there from the start.
    """
    found = []
    for batch in sorted({run.batch for run in runs}):
        alike = [run for run in runs if run.batch == batch]
        reached = [
            (steps, run.rate) for run in alike if (steps := run.steps_to(loss, smooth)) is not None
        ]
        if not reached:
            raise ValueError(
                f"--target-loss {loss:g}: no run with a batch of {batch} tokens gets there "
                f"({', '.join(str(run.path) for run in alike)}; lowest logged loss "
                f"{min(min(run.losses) for run in alike):.4g}, means are over {smooth}). Give a "
                "loss that a run of each batch has reached."
            )
        steps, rate = min(reached)
        rates = sorted({run.rate for run in alike})
        edge = len(rates) < 3 or rate in (rates[0], rates[-1])
        found.append(BatchBest(batch, rate, steps, len(rates), edge))
    return found
