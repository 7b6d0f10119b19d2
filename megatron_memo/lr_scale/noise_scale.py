"""B_noise from runs: from the best learning rates of batches, or from steps and tokens to a loss.

Both laws of `formula` are straight lines in the right coordinates, so two runs give B_noise and
more give it with an error that can be seen:

- best rates:      sqrt(B) / lr = (B_noise + B) / (2 * lr_max * sqrt(B_noise))    a line in B
- steps to a loss: steps = steps_min + steps_min * B_noise / B                     a line in 1 / B

Gradient norms at two batch sizes are not used, though logs have them: they give tr(noise) / |g|^2,
the noise scale of plain SGD, in which a few coordinates with large gradients decide. Signs give
each coordinate the same weight, and B_noise depends on the curvature as well;
tests/lr_scale/test_sign_descent.py shows a problem where the two are a factor of 8 apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_memo.lr_scale.formula import relative_rate
from megatron_memo.lr_scale.words import tokens_words


@dataclass(frozen=True)
class Estimate:
    """B_noise and what speaks for it.

    Attributes:
        noise: B_noise, tokens.
        runs: how many runs went in.
        misfit: largest relative deviation of a run from the fitted law; 0 for two runs, which any
            law fits.
        low, high: B_noise if every rate was as wrong as the scan's spacing allows; 0 and infinity
            where the runs then tell no bound. None without a spacing.
    """

    noise: float
    runs: int
    misfit: float
    low: float | None = None
    high: float | None = None


def from_rates(rates: Sequence[tuple[float, float]], spacing: float | None = None) -> Estimate:
    """B_noise from the best learning rates of two or more batches.

    Args:
        rates: (tokens of a batch, its best learning rate).
        spacing: factor between neighbouring rates of the scan that found them; the true best may
            be its square root away to either side.

    Raises:
        ValueError: fewer than two different batches, or the rates show no bend.
    """
    _need_two([batch for batch, _ in rates], "best learning rates")
    rates = sorted(rates)
    batches = [batch for batch, _ in rates]
    values = [math.sqrt(batch) / rate for batch, rate in rates]
    start, slope = _line(batches, values)
    if slope <= 0:
        raise ValueError(
            "the best learning rates rise as the square root of the batch or faster, so all of "
            "these batches are far below B_noise, which could be anywhere above. Add a run at a "
            f"batch above {tokens_words(batches[-1])} tokens."
        )
    if start <= 0:
        raise ValueError(
            "the best learning rates fall faster than the law, 1 / sqrt(batch), allows, so B_noise "
            "is far below these batches. Add a run at a batch below "
            f"{tokens_words(batches[0])} tokens, or scan learning rates more finely."
        )
    misfit = _misfit(batches, values, start, slope)
    if spacing is None:
        return Estimate(start / slope, len(rates), misfit)
    low, high = _range(batches, values, math.sqrt(spacing))
    return Estimate(start / slope, len(rates), misfit, low, high)


def from_runs(runs: Sequence[tuple[float, float]]) -> Estimate:
    """B_noise from the steps and tokens in which two or more runs reached one loss.

    A rate that is a little off costs few steps (the optimum is flat), so this is the better one of
    the two where rates were scanned coarsely.

    Args:
        runs: (steps, tokens), each at its batch's best learning rate; the batch is their quotient.

    Raises:
        ValueError: fewer than two different batches, or the steps show no bend.
    """
    _need_two([tokens / steps for steps, tokens in runs], "runs to one loss")
    inverse = [steps / tokens for steps, tokens in runs]
    steps = [steps for steps, _ in runs]
    start, slope = _line(inverse, steps)
    if slope <= 0:
        raise ValueError(
            "a larger batch did not take fewer steps to the loss, so B_noise is far below these "
            f"batches. Add a run at a batch below {tokens_words(1 / max(inverse))} tokens, and "
            "check that each run has its batch's best learning rate."
        )
    if start <= 0:
        raise ValueError(
            "a larger batch took fewer steps to the loss in proportion or more, so B_noise is far "
            f"above these batches. Add a run at a batch above {tokens_words(1 / min(inverse))} "
            "tokens, and check that each run has its batch's best learning rate."
        )
    return Estimate(slope / start, len(runs), _misfit(inverse, steps, start, slope))


def largest_rate(rates: Sequence[tuple[float, float]], noise: float) -> float:
    """lr_max that fits known (batch, best learning rate) pairs best, on a logarithmic scale."""
    logs = [math.log(rate / relative_rate(batch, noise)) for batch, rate in rates]
    return math.exp(sum(logs) / len(logs))


def _need_two(batches: Sequence[float], what: str) -> None:
    different = len(set(batches))
    if different < 2:
        raise ValueError(
            f"B_noise needs {what} at two different batches at least, here is {different}. Add one "
            "at another batch, four times as large if you can choose."
        )


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Start and slope with the least sum of squared relative deviations from `y`, all above 0."""
    weights = [1 / value**2 for value in y]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    points = list(zip(weights, x, y, strict=True))
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in points)
    slope /= sum(w * (a - mean_x) ** 2 for w, a, _ in points)
    return mean_y - slope * mean_x, slope


def _misfit(x: Sequence[float], y: Sequence[float], start: float, slope: float) -> float:
    if len(x) == 2:
        return 0.0
    return max(abs((start + slope * a) / b - 1) for a, b in zip(x, y, strict=True))


def _range(x: Sequence[float], y: Sequence[float], factor: float) -> tuple[float, float]:
    """Least and largest B_noise if each of `y` may be off by `factor`.

    `x` ascends. The extremes tilt the line: all values up on one side of a point and down on the
    other.
    """
    found = []
    for turn in range(1, len(x)):
        for left, right in ((factor, 1 / factor), (1 / factor, factor)):
            tilted = [v * (left if i < turn else right) for i, v in enumerate(y)]
            start, slope = _line(x, tilted)
            found.append(math.inf if slope <= 0 else max(start / slope, 0.0))
    return min(found), max(found)
