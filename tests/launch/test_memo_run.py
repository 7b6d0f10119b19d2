"""Training with a swap ratio, over two tensor-parallel ranks with sequence parallelism."""

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

FLAGS = [
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--hidden-dropout", "0"),
    *("--train-iters", "4", "--split", "90,5,5"),
    *("--ckpt-format", "torch"),
]
# Relative, on the loss after a few steps in fp32 (epsilon 1.2e-7): several chunks sum weight
# gradients in another order, and each step adds one rounding of the update.
SAME = 1e-5


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """(stock with a checkpoint at iteration 2, memo resumed from that checkpoint)."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    stock = train(2, *FLAGS, "--save", folder, "--save-interval", "2")
    memo = train(
        *(2, *FLAGS, "--load", folder, "--ckpt-step", "2"),
        *("--memo-swap-ratio", "0.5", "--memo-chunks", "4", "--memo-resident-layers", "0"),
        *("--memo-poison", "--memo-measure-memory", "4"),
    )
    return stock, memo


def test_losses_are_those_of_stock(runs):
    stock, memo = runs
    assert list(memo.losses) == [3, 4]
    for step, loss in memo.losses.items():
        assert loss == pytest.approx(stock.losses[step], rel=SAME)


def test_stock_log_says_why_norm_and_attention_are_memos(runs):
    assert "memo's (upstream's torch norm refuses --sequence-parallel)" in runs[0].out


def test_no_dense_mask_is_built(runs):
    for run in runs:
        assert "added --no-create-attention-mask-in-dataloader" in run.out
        assert "create_attention_mask=False" in run.err + run.out


def test_report_holds_settings_memory_and_traffic(runs):
    report = runs[1].report
    assert report["memo"]["swap_ratio"] == 0.5
    assert report["memo"]["chunks"] == 4
    assert report["peak_activation_bytes"] > 0
    assert report["swap"]["host_bytes"] > 0
    assert report["device"] == "cpu"
    assert {"torch", "megatron-core", "megatron-memo"} <= report["versions"].keys()


def test_only_the_measured_iteration_is_marked(runs):
    marked = [row["iteration"] for row in runs[1].report["iterations"] if row["metered"]]
    assert marked == [4]
    assert all(row["seconds"] > 0 for row in runs[1].report["iterations"])


def test_stock_report_has_no_memo_part(runs):
    assert runs[0].report["memo"] is None
    assert runs[0].report["swap"] is None
    assert runs[0].report["peak_activation_bytes"] is None
