"""Training with a swap ratio, over two data-parallel ranks that share the optimizer, in bf16."""

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

STEPS, SAVED = 20, 18
FLAGS = [  # two micro-batches on each rank
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--hidden-dropout", "0", "--train-iters", str(STEPS), "--ckpt-format", "torch_dist"),
]
STOCK = [*FLAGS, "--memo-modules", "memo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def stock(train):
    """Upstream's layer over memo's norm and attention."""
    return train(2, "gpt", *STOCK)


@pytest.fixture(scope="module")
def mixed(train):
    """Half of the tokens swapped and half recomputed, in as many chunks as memo chooses."""
    return train(2, "gpt", *FLAGS, "--memo-swap-ratio", "0.5", "--memo-resident-layers", "0")


@pytest.fixture(scope="module")
def swapped(train, folder):
    """Everything swapped in one chunk; checkpoints at iterations 18 and 20."""
    return train(
        *(2, "gpt", *FLAGS, "--memo-swap-ratio", "1", "--memo-chunks", "1"),
        *("--memo-resident-layers", "0", "--save", folder, "--save-interval", str(SAVED)),
    )


@pytest.fixture(scope="module")
def resumed(train, swapped, folder):
    """Upstream's layer from memo's checkpoint."""
    return train(2, "gpt", *STOCK, "--load", folder, "--ckpt-step", str(SAVED))


def test_curves_coincide(stock, mixed, rounding):
    """As in fp32 (see test_memo_run), with bf16's roundings (unit roundoff u = 2^-8).

    They hide those of fp32: the gradients that a weight gets from two chunks are each rounded to
    bf16, and so is their sum, where stock's gradient is rounded once: a weight's update errs by up
    to 3 u. Signs are independent over more than 9 weights, so a step's change of the loss, a sum
    over them, errs by less than u of itself.
    """
    assert list(mixed.losses) == list(range(1, STEPS + 1))
    assert stock.losses[STEPS] < 0.5 * stock.losses[1]
    rounding(mixed.losses, stock.losses, 2**-8)


def test_everything_swapped_in_one_chunk_is_bitwise_stock(stock, swapped):
    assert list(swapped.losses) == list(range(1, STEPS + 1))
    assert swapped.losses == stock.losses
    assert swapped.validation == stock.validation


def test_memos_checkpoint_trained_on_by_upstreams_layer_is_bitwise_stock(stock, resumed):
    assert list(resumed.losses) == list(range(SAVED + 1, STEPS + 1))
    assert resumed.losses == {step: stock.losses[step] for step in resumed.losses}


def test_evaluation_runs_between_training_steps(stock, mixed):
    assert list(stock.validation) == list(mixed.validation) == [5, 10, 15, 20]
    assert "validation loss at iteration 20 on test set" in mixed.out


def test_log_says_who_asked_for_memos_modules(stock):
    assert "memo's (asked for by --memo-modules memo)" in stock.out
