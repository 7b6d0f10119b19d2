"""Training with a swap ratio over two pipeline stages: several micro-batches are in flight."""

import re
from functools import cache

import pytest

from megatron_memo.platform import is_active
from megatron_memo.sizes import parse_size

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

STEPS = 6
PIPELINE = [
    *("--pipeline-model-parallel-size", "2", "--train-iters", str(STEPS)),
    *("--hidden-dropout", "0.1"),
]
# Stages of one and three layers.
UNEVEN = [*PIPELINE, "--num-layers", "4", "--decoder-first-pipeline-num-layers", "1"]
# Two virtual stages of one layer on each rank, the case in which an empty queue says nothing about
# whose turn it is; the first has the embedding in place of a layer.
INTERLEAVED = [
    *(*PIPELINE, "--num-layers", "3", "--num-layers-per-virtual-pipeline-stage", "1"),
    "--account-for-embedding-in-pipeline-split",
]
SCHEDULES = {"in turn": UNEVEN, "interleaved": INTERLEAVED}
# Bitwise stock: one chunk. Resident layers are the model's last, so on the last stage only.
CASES = [("in turn", "1", "1"), ("interleaved", "0", "0")]


@pytest.fixture(scope="module")
def stock(train):
    """``stock(schedule)``: upstream's layer over memo's norm and attention."""
    return cache(lambda name: train(2, "llama", *SCHEDULES[name], "--memo-modules", "memo"))


@pytest.mark.parametrize(("schedule", "ratio", "resident"), CASES)
def test_one_chunk_is_bitwise_stock_with_micro_batches_in_flight(
    train, stock, schedule, ratio, resident
):
    memo = train(
        *(2, "llama", *SCHEDULES[schedule], "--memo-swap-ratio", ratio, "--memo-chunks", "1"),
        *("--memo-resident-layers", resident, "--memo-poison"),
    )
    expected = stock(schedule)
    assert list(memo.losses) == list(range(1, STEPS + 1))
    assert all(loss > 0 for loss in memo.losses.values())
    assert memo.losses == expected.losses
    assert memo.logged == expected.logged
    assert memo.validation == expected.validation
    told = re.search(r"host memory: (\S+ \S+) needed .* of pipeline stage (\d)", memo.out)
    # What was told before the start, to four digits, of the fullest stage; rank 0 is the first.
    needed, held = parse_size(told[1]), memo.report["swap"]["host_bytes"]
    assert 0 < held <= 1.001 * needed
    assert told[2] != "0" or held == pytest.approx(needed, rel=1e-3)
