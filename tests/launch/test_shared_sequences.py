"""Training on sequences that context-parallel ranks share, and on packed documents."""

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

STEPS, PLANNED_STEPS = 4, 6  # a memory plan is in use from the fifth on
PLAIN = ["--hidden-dropout", "0", "--train-iters", str(STEPS)]
MEMO = ["--memo-resident-layers", "0", "--memo-poison"]


def test_two_ranks_that_share_each_sequence_train_as_one_rank_does(train, rounding):
    """Sums over tokens (weight gradients, losses) are added in another order: four micro-batches of
    256 tokens, so at most 1024 terms, as in test_memo_run."""
    alone = train(1, "llama", *PLAIN, "--memo-modules", "memo")
    shared = train(
        *(2, "llama", *PLAIN, *MEMO, "--context-parallel-size", "2"),
        *("--memo-swap-ratio", "0.5", "--memo-chunks", "2"),
    )
    assert list(shared.losses) == list(range(1, STEPS + 1))
    rounding(shared.losses, alone.losses, 1024**0.5 * 2**-24)
    assert "added --cp-comm-type a2a" in shared.out
    assert "128 of 256 tokens swapped, the rest recomputed, in 2 token chunks" in shared.out
    # The ranks' halves: an input and an attention output for each of two layers, and more.
    assert shared.report["swap"]["host_bytes"] > 2 * 2 * 128 * 32 * 4


def test_packed_documents_in_one_chunk_train_bitwise_as_stock_does(train):
    """Made-up documents have up to 4096 tokens, so that most samples of 2048 end one and begin
    another; the two samples of a micro-batch are joined to one row."""
    packed = [
        *(*PLAIN, "--dataloader-inter-document-masking", "--micro-batch-size", "2"),
        *("--global-batch-size", "2", "--eval-iters", "0"),
        *("--seq-length", "2048", "--max-position-embeddings", "2048"),
        *("--train-iters", str(PLANNED_STEPS)),
    ]
    stock = train(1, "llama", *packed)
    one_chunk = ("--memo-swap-ratio", "0", "--memo-chunks", "1")
    memo = train(1, "llama", *packed, *MEMO, *one_chunk, "--memo-plan", "auto")
    assert "local attention refuses the packed sequences of --dataloader-inter" in stock.out
    assert list(memo.losses) == list(range(1, PLANNED_STEPS + 1))
    assert memo.losses == stock.losses
    assert memo.logged == stock.logged
    # Attention asks for memory by the documents' lengths, which differ: these requests miss.
    last = memo.report["plan"]["steps"][-1]
    assert last["iteration"] == PLANNED_STEPS and last["hits"] > 0.5 * last["requests"], last
    assert "all 4096 tokens recomputed, in 1 token chunk" in memo.out
