"""The law against real steps: descent by a noisy gradient's sign, best rates found by a scan."""

from dataclasses import dataclass

import numpy as np
import pytest

from megatron_memo.lr_scale.formula import relative_rate, relative_tokens
from megatron_memo.lr_scale.noise_scale import from_rates, from_runs

COORDINATES, CURVATURE_SHARED, SIGNAL = 128, 0.3, 0.04
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = np.geomspace(3e-5, 2e-2, 220)


@dataclass(frozen=True)
class Best:
    """The rate of the scan that lowers the loss most in a step, and by how much it does."""

    rate: float
    gain: float


class Quadratic:
    """loss(w) = w·mean + w·H·w / 2 around the point where w is 0.

    Args:
        noise: "apart" (each coordinate has its own) or "shared" (as correlated as the curvature).
    """

    def __init__(self, noise="apart"):
        rng = np.random.default_rng(0)
        shared = np.full((COORDINATES, COORDINATES), CURVATURE_SHARED)
        self.hessian = shared + (1 - CURVATURE_SHARED) * np.eye(COORDINATES)
        self.deviation = rng.uniform(0.5, 2.0, COORDINATES)
        self.mean = SIGNAL * self.deviation * rng.uniform(0.5, 1.5, COORDINATES)
        self.mixing = np.eye(COORDINATES) if noise == "apart" else np.linalg.cholesky(self.hessian)

    def gradients(self, batch, draws, rng):
        """Means over `batch` samples; [draws, coordinates]."""
        noise = rng.standard_normal((draws, COORDINATES)) @ self.mixing.T * self.deviation
        return self.mean + noise / np.sqrt(batch)

    def best(self, batch, draws=4000):
        steps = -np.sign(self.gradients(batch, draws, np.random.default_rng(1)))
        slope, bend = steps @ self.mean, np.einsum("di,di->d", steps @ self.hessian, steps)
        losses = [np.mean(rate * slope + rate**2 / 2 * bend) for rate in RATES]
        lowest = int(np.argmin(losses))
        assert 0 < lowest < len(RATES) - 1, "the scan has to go beyond the best rate"
        return Best(RATES[lowest], -losses[lowest])


@pytest.fixture(scope="module")
def apart():
    problem = Quadratic()
    return {batch: problem.best(batch) for batch in BATCHES}


@pytest.fixture(scope="module")
def shared():
    problem = Quadratic("shared")
    return {batch: problem.best(batch) for batch in (*BATCHES, 512, 1024, 4096)}


def rates(found, batches=BATCHES):
    return [(batch, found[batch].rate) for batch in batches]


def runs(found, batches=BATCHES):
    """Steps and tokens to one (small) gain."""
    return [(1 / found[batch].gain, batch / found[batch].gain) for batch in batches]


def test_the_best_rate_rises_peaks_and_falls_as_the_law_says(apart):
    estimate = from_rates(rates(apart))
    assert 16 < estimate.noise < 64
    assert estimate.misfit < 0.08
    top = max(RATES[0], *(best.rate for best in apart.values()))
    assert apart[1].rate < 0.5 * top and apart[256].rate < 0.85 * top
    for batch, best in apart.items():
        assert best.rate == pytest.approx(top * relative_rate(batch, estimate.noise), rel=0.12)


def test_two_small_batches_foretell_the_rates_of_larger_ones(apart):
    known = [(4, apart[4].rate), (16, apart[16].rate)]
    noise = from_rates(known).noise
    for batch in (32, 64, 128):
        foretold = apart[16].rate * relative_rate(batch, noise) / relative_rate(16, noise)
        assert apart[batch].rate == pytest.approx(foretold, rel=0.2)


def test_rates_and_steps_give_the_same_noise(apart):
    by_rates, by_runs = from_rates(rates(apart)).noise, from_runs(runs(apart)).noise
    assert by_runs == pytest.approx(by_rates, rel=0.3)


def test_tokens_follow_the_trade_off(apart):
    noise = from_runs(runs(apart)).noise
    for batch in (4, 64, 256):
        measured = (batch / apart[batch].gain) / (1 / apart[1].gain)
        law = relative_tokens(batch, noise) / relative_tokens(1, noise)
        assert measured == pytest.approx(law, rel=0.1)


def test_gradient_norms_give_another_noise_scale(apart):
    """Why `noise_scale` does not use them: |mean|^2 + tr / batch, solved from two batch sizes."""
    rng, problem = np.random.default_rng(2), Quadratic()
    small, large = (np.mean(problem.gradients(b, 4000, rng) ** 2) for b in (8, 512))
    trace = (small - large) / (1 / 8 - 1 / 512)
    simple = trace / (large - trace / 512)
    assert simple > 8 * from_rates(rates(apart)).noise


def test_where_noise_is_as_correlated_as_curvature_the_fall_is_slower(shared):
    """A limit that the command's notes name: signs stop being noisy before the peak is passed."""
    rates_found = {batch: best.rate for batch, best in shared.items()}
    peak = max(rates_found, key=rates_found.get)
    assert peak >= 128 and rates_found[16] > 3 * rates_found[1]
    largest = max(rates_found)
    fallen = rates_found[largest] / rates_found[peak]
    assert 0.65 < fallen < 0.9 and relative_rate(largest, peak) < 0.7 * fallen
