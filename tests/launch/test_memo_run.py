"""Training with a swap ratio, over two tensor-parallel ranks with sequence parallelism, in fp32."""

import os
import re

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

STEPS = 20
FLAGS = [
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--hidden-dropout", "0"),
    *("--train-iters", str(STEPS), "--global-batch-size", "2", "--ckpt-format", "torch"),
]
MEASURED = ("--memo-measure-memory", str(STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def stock(train, folder):
    """Upstream's layer; checkpoints at iterations 10 and 20."""
    return train(2, "llama", *FLAGS, "--save", folder, "--save-interval", "10", *MEASURED)


@pytest.fixture(scope="module")
def mixed(train):
    """Half of the tokens swapped and half recomputed, freed memory poisoned."""
    return train(
        *(2, "llama", *FLAGS, "--memo-swap-ratio", "0.5", "--memo-resident-layers", "0"),
        *("--memo-chunks", "4", "--memo-poison", "--memo-measure-memory", str(STEPS)),
    )


@pytest.fixture(scope="module")
def spilled(train, tmp_path_factory):
    """As mixed, with less host memory than it takes, and a disk."""
    disk = str(tmp_path_factory.mktemp("disk"))
    run = train(
        *(2, "llama", *FLAGS, "--memo-swap-ratio", "0.5", "--memo-resident-layers", "0"),
        *("--memo-chunks", "4", "--memo-host-budget", "400KiB", "--memo-nvme-path", disk),
    )
    return run, disk


@pytest.fixture(scope="module")
def resumed(train, stock, folder):
    """Everything swapped in one chunk, from stock's checkpoint at iteration 10."""
    return train(
        *(2, "llama", *FLAGS, *MEASURED, "--load", folder, "--ckpt-step", "10"),
        *("--memo-swap-ratio", "1", "--memo-chunks", "1", "--memo-resident-layers", "0"),
    )


def test_curves_coincide(stock, mixed, rounding):
    """Chunks change nothing but the order in which a weight's gradient is summed over the tokens.

    Summing n = 512 terms (256 tokens, two micro-batches) in another order in fp32 (unit roundoff
    u = 2^-24) changes the sum by about sqrt(n) u of its terms' size, rounding errors being
    independent. Adam divides a gradient by its own size, so each update errs by that fraction;
    where terms cancel it errs by more, and the loss depends on that weight by as much less. So to
    first order a step's change of the loss errs by this fraction of itself, and a whole curve by
    this fraction of the way it has gone.
    """
    assert list(mixed.losses) == list(range(1, STEPS + 1))
    assert stock.losses[STEPS] < 0.5 * stock.losses[1]
    rounding(mixed.losses, stock.losses, 512**0.5 * 2**-24)


def test_stock_checkpoint_trained_on_in_one_swapped_chunk_is_bitwise_stock(stock, resumed):
    assert list(resumed.losses) == list(range(11, STEPS + 1))
    assert resumed.losses == {step: stock.losses[step] for step in resumed.losses}


def test_a_resumed_run_holds_no_more_than_one_that_began(stock, resumed):
    assert resumed.report["held_bytes"] == stock.report["held_bytes"] > 0


def test_what_goes_through_a_disk_is_bitwise_what_goes_through_memory(mixed, spilled):
    run, disk = spilled
    assert run.losses == mixed.losses
    assert run.report["swap"]["host_bytes"] <= 200 << 10
    assert run.report["swap"]["disk_bytes"] > 100 << 10
    assert "200 KiB to be had (--memo-host-budget 400KiB, shared by 2 ranks), " in run.out
    assert f" of it go to {disk}, written and read " in run.out
    assert os.listdir(disk) == []


def test_validation_losses_coincide(stock, mixed, resumed):
    assert list(stock.validation) == [5, 10, 15, 20]
    assert mixed.validation == pytest.approx(stock.validation, rel=1e-5)  # logged with 7 digits
    assert resumed.validation == {step: stock.validation[step] for step in (15, 20)}


def test_stock_log_says_why_norm_and_attention_are_memos(stock):
    assert "memo's (upstream's torch norm refuses --sequence-parallel)" in stock.out


def test_one_line_says_what_memo_does_on_which_limits_and_over_which_link(mixed):
    said = [line for line in mixed.out.splitlines() if line.startswith("megatron_memo: ratio ")]
    assert len(said) == 1
    parts = said[0].removeprefix("megatron_memo: ").split("; ")
    assert parts[:2] == [
        "ratio 0.5: 128 of 256 tokens swapped, the rest recomputed, in 4 token chunks",
        "no layer stays on the device",
    ]
    assert parts[2].startswith("9 of a layer's 9 steps in flight, about ")
    assert re.match(r"host memory: .* needed on a rank \(.*\), .* to be had \(", parts[3])
    assert re.match(
        r"link: .*B/s to the host, .*B/s back with all ranks of a node copying", parts[4]
    )
    assert len(parts) == 5


def test_no_dense_mask_is_built(stock, mixed):
    for run in (stock, mixed):
        assert "added --no-create-attention-mask-in-dataloader" in run.out
        assert "create_attention_mask=False" in run.err + run.out


def test_report_holds_settings_memory_and_traffic(mixed):
    report = mixed.report
    assert report["memo"]["swap_ratio"] == 0.5
    assert report["memo"]["chunks"] == 4
    assert report["peak_activation_bytes"] > 0
    # More than both layers' inputs and attention outputs: chunks were swapped.
    assert report["swap"]["host_bytes"] > 2 * (128 * 32 + 256 * 16) * 4
    assert report["device"] == "cpu"
    assert {"torch", "megatron-core", "megatron-memo"} <= report["versions"].keys()


def test_only_the_measured_iteration_is_marked(mixed):
    marked = [row["iteration"] for row in mixed.report["iterations"] if row["metered"]]
    assert marked == [STEPS]
    assert all(row["seconds"] > 0 for row in mixed.report["iterations"])


def test_stock_report_has_no_memo_part(stock):
    assert stock.report["memo"] is None
    assert stock.report["swap"] is None
