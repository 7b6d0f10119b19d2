"""Training with the loss computed in token chunks, as a user turns it on."""

from pathlib import Path

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

LAUNCHER = str(Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py")
STEPS = 10
MEMO = [
    *("--memo-swap-ratio", "1", "--memo-chunks", "1", "--memo-resident-layers", "0"),
    *("--train-iters", str(STEPS)),
]
FLAGS = [*MEMO, "--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.fixture(scope="module")
def whole(train):
    return train(2, "llama", *FLAGS)


def test_in_one_chunk_training_is_bitwise_that_with_whole_logits(train, whole):
    chunked = train(2, "llama", *FLAGS, "--memo-loss-chunks", "1")
    assert list(chunked.losses) == list(range(1, STEPS + 1))
    assert chunked.losses == whole.losses
    assert chunked.logged == whole.logged
    assert chunked.validation == whole.validation
    assert "; loss in 1 token chunks; " in chunked.out and "loss in" not in whole.out


def test_in_several_chunks_only_roundings_differ(train, whole, rounding):
    """fp32: the gradient of one weight, the head's and the embedding's, is another sum, over 5
    chunks of a rank's 128 rows.

    As for the layer's chunks (test_memo_run), a sum over 256 tokens in another order errs by at
    most the square root of their number times fp32's unit roundoff of itself.
    """
    several = train(2, "llama", *FLAGS, "--memo-loss-chunks", "5")
    assert "loss in 5 token chunks, embedding too" in several.out
    assert several.losses[1] == whole.losses[1]
    rounding(several.losses, whole.losses, 256**0.5 * 2**-24)


def test_more_chunks_than_tokens_is_refused_by_name(attempt, tiny):
    refused = attempt(1, LAUNCHER, *tiny, *MEMO, "--memo-loss-chunks", "257")
    assert refused.status != 0
    assert refused.err.count("megatron-memo: error: --memo-loss-chunks 257: more than the 256") == 1
