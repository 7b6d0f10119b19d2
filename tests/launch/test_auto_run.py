"""A training run that finds its own ratio."""

import math

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

FLAGS = [
    *("--num-layers", "3", "--train-iters", "5", "--global-batch-size", "1"),
    *("--memo-resident-layers", "0"),
]


def test_one_flag_trains_with_the_ratio_that_the_run_measured(train):
    # So slow a link that moving everything cannot be the best, by far: the probe waits for some
    # copies of 8 MiB.
    slow = ("--memo-link-bandwidth", "4MiB")
    run = train(1, "llama", *FLAGS, "--memo-swap-ratio", "auto", *slow)
    assert run.out.count("megatron_memo: swap ratio ") == 1
    assert "bound by D2H bandwidth" in run.out or "bound by H2D bandwidth" in run.out
    assert "until the best swap ratio is known, ratio 0" in run.out
    ratio = run.report["memo"]["swap_ratio"]
    assert 0 <= ratio < 1 and f"swap ratio {ratio:.4g} (" in run.out
    assert len(run.losses) == 5 and all(math.isfinite(loss) for loss in run.losses.values())
