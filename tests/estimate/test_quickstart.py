"""The quickstart's model: the device memory that the estimate says is what training takes."""

import json
from pathlib import Path

import pytest

from megatron_memo.estimate.flags import read_run
from megatron_memo.estimate.profiled import profiled_peak
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# As the quickstart's, but for a shorter context and data that need no preparation.
SHORTER = "--seq-length 2048 --mock-data --train-iters 2 --eval-iters 0 --lr-warmup-iters 0"
MEMO = "--memo-swap-ratio 0.5 --memo-resident-layers 0 --memo-chunks 4"


def test_peak_device_bytes_are_within_2_percent_of_measured(quickstart, tmp_path):
    words = [*quickstart, *SHORTER.split(), *MEMO.split()]
    report = tmp_path / "report.json"
    measuring = ("--memo-report", str(report), "--memo-measure-memory", "2")
    training = run_ranks(2, ROOT / "pretrain_gpt_memo.py", [*words, *measuring], timeout=250)
    assert training.returncode == 0, training.stderr[-4000:]
    peak = profiled_peak(
        words,
        read_run(words, 2).job,
        stage=0,
        device="cpu",
        device_bytes=4 << 30,
        tell=lambda _words: None,
    )
    measured = json.loads(report.read_text())
    # The report's peak is above what the rank holds between iterations.
    estimated = peak.parts.total - peak.held
    assert estimated == pytest.approx(measured["peak_activation_bytes"], rel=0.02)
    assert peak.host_bytes == measured["swap"]["host_bytes"] > 0
    assert peak.parts.weights == peak.parts.gradients > 0  # fp32
    assert peak.parts.optimizer >= 2 * peak.parts.weights
    assert measured["job"]["layers"] == 5 and measured["recompute"] is None
