"""Without memo flags the launcher is stock Megatron, and Megatron resumes without CUDA."""

from pathlib import Path

import pytest
import torch

from megatron_memo.platform import is_active

LAUNCHER = str(Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py")
SCRIPT = str(Path(__file__).with_name("stock_script.py"))
STEPS, SAVED = 6, 4

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")


@pytest.fixture(scope="module")
def go(start, tiny, tmp_path_factory):
    """``go(*words)``: a run over two data-parallel ranks that share the optimizer, and its folder.

    By torchrun, unless ``by`` says otherwise. Checkpoints in the older format; the other one is
    tested in test_data_parallel.
    """
    flags = [
        *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"),
        *("--overlap-param-gather", "--hidden-dropout", "0.1", "--train-iters", str(STEPS)),
        *("--save-interval", str(SAVED), "--ckpt-format", "torch"),
    ]

    def run(*words, by=start):
        folder = tmp_path_factory.mktemp("stock")
        done = by(2, *words, *tiny, *flags, "--save", str(folder))
        assert done.status == 0, done.err[-5000:]
        return done, folder

    return run


@pytest.fixture(scope="module")
def ours(go):
    """The launcher without memo flags."""
    return go(LAUNCHER)


@pytest.fixture(scope="module")
def stock(go, plain_kernels):
    """A script without memo."""
    return go("-m", "megatron_memo.platform", SCRIPT, *plain_kernels)


@pytest.fixture(scope="module")
def resumed(go, attempt, ours):
    """The launcher from its own checkpoint at iteration 4."""
    # Upstream's --ckpt-step does not choose the optimizer's state in this format; see compat.
    (ours[1] / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return go(LAUNCHER, "--load", str(ours[1]), by=attempt)


def parameters(folder):
    """Name to value, after the last iteration."""
    file = folder / f"iter_{STEPS:07}" / "mp_rank_00" / "model_optim_rng.pt"
    model = torch.load(file, weights_only=False)["model"]
    return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}


def assert_same_parameters(one, other):
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_losses_and_gradient_norms_are_those_of_a_script_without_memo(ours, stock):
    assert len(stock[0].logged) == STEPS
    assert ours[0].logged == stock[0].logged


def test_trained_parameters_are_bitwise_those_of_a_script_without_memo(ours, stock):
    assert_same_parameters(parameters(ours[1]), parameters(stock[1]))


def test_resumed_run_ends_in_bitwise_the_same_parameters(ours, resumed):
    # Not its second loss: Megatron logs that one averaged with the first after a start.
    assert resumed[0].logged[0] == ours[0].logged[SAVED]
    assert len(resumed[0].logged) == STEPS - SAVED
    assert_same_parameters(parameters(ours[1]), parameters(resumed[1]))


def test_log_says_once_that_there_is_no_cuda_and_which_flags_were_added(ours):
    assert ours[0].out.count("megatron_memo: no CUDA on this machine") == 1
    assert ours[0].out.count("megatron_memo: no CUDA here: added --transformer-impl local") == 1


def test_upstream_modules_are_not_replaced(ours):
    assert "core attention of the layers are memo's" not in ours[0].out


def test_no_warning_of_a_cpu_generator_that_changed(ours):
    assert "CPU RNG state changed" not in ours[0].err + ours[0].out
