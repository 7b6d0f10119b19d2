"""A resumed run repeats the losses: data parallel, distributed optimizer, bf16, both formats."""

from pathlib import Path

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

FLAGS = [
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--hidden-dropout", "0.1", "--train-iters", "6", "--split", "90,5,5"),
]


@pytest.fixture(scope="module", params=["torch_dist", "torch"])
def runs(request, train, tmp_path_factory):
    """(whole run, run resumed from its checkpoint at iteration 4) over two data-parallel ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    flags = [*FLAGS, "--ckpt-format", request.param]
    whole = train(2, *flags, "--save", folder, "--save-interval", "4")
    Path(folder, "latest_checkpointed_iteration.txt").write_text("4")
    resumed = train(2, *flags, "--load", folder)
    return whole, resumed


def test_losses_fall(runs):
    losses = runs[0].losses
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1]


def test_resumed_losses_are_bitwise_the_same(runs):
    whole, resumed = runs
    assert list(resumed.losses) == [5, 6]
    assert resumed.losses == {step: whole.losses[step] for step in (5, 6)}


def test_evaluation_runs_between_training_steps(runs):
    assert "validation loss at iteration 2" in runs[0].out
    assert "validation loss at iteration 6 on test set" in runs[0].out
