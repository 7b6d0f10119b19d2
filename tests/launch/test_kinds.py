"""Training of models whose layers differ: experts, dense layers between, multi-token prediction.

Two tensor-parallel ranks with sequence parallelism, each with half of the experts; tied embeddings.
"""

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

STEPS = 7  # a memory plan is in use from the fifth on
_FLAGS = """
    --num-layers 3 --num-experts 4 --moe-layer-freq [1,0,1] --moe-router-topk 2
    --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-aux-loss-coeff 0.01
    --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --mtp-num-layers 1 --tensor-model-parallel-size 2
    --sequence-parallel --hidden-dropout 0.1
"""
_MEMO = """
    --memo-swap-ratio 0 --memo-chunks 1 --memo-resident-layers 1 --memo-loss-chunks 1
    --memo-moe-experts recompute --memo-plan auto --memo-poison --recompute-activations
"""
FLAGS, MEMO = _FLAGS.split(), _MEMO.split()


@pytest.fixture(scope="module")
def stock(train):
    """Upstream's layers over memo's norm and attention, which upstream's own norm makes needed."""
    return train(2, "llama", *FLAGS, "--train-iters", str(STEPS))


@pytest.fixture(scope="module")
def memo(train):
    return train(2, "llama", *FLAGS, "--train-iters", str(STEPS), *MEMO)


def test_one_chunk_is_bitwise_stock(stock, memo):
    assert list(memo.losses) == list(range(1, STEPS + 1))
    assert memo.losses == stock.losses
    assert memo.logged == stock.logged
    assert memo.validation == stock.validation


def test_a_memory_plan_serves_what_fits_although_experts_get_other_tokens_each_time(memo):
    """The recorded iteration's routing is not repeated: requests of another size are served by the
    allocator beneath, and the numbers are bitwise stock's all the same."""
    steps = {row["iteration"]: row for row in memo.report["plan"]["steps"]}
    for iteration in range(5, STEPS + 1):
        row = steps[iteration]
        assert row["hits"] > 0.5 * row["requests"], row
        assert row["miss_unknown"] > 0, "no request had another size: this shows nothing"


@pytest.mark.parametrize("name", ["mtp_1 loss", "load_balancing_loss", "z_loss"])
def test_what_megatron_logs_beside_the_loss_is_the_same(stock, memo, name):
    def logged(run):
        return [part for part in run.out.replace("\n", "|").split("|") if f" {name}:" in part]

    assert len(logged(stock)) >= STEPS
    assert logged(memo) == logged(stock)


def test_the_log_says_what_experts_do_and_that_selective_recompute_does_nothing(memo):
    assert "the last of 4 layers stays on the device; experts: recompute; " in memo.out
    assert " of a layer's 4 steps in flight, about " in memo.out
    assert "--recompute-granularity selective changes nothing" in memo.out
    assert memo.report["memo"]["moe_experts"] == "recompute"
    assert memo.report["swap"]["host_bytes"] > 0
