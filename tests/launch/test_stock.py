"""Without memo flags the launcher is stock Megatron."""

from pathlib import Path

import pytest
import torch

from megatron_memo.platform import is_active

LAUNCHER = str(Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py")
SCRIPT = str(Path(__file__).with_name("stock_script.py"))

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")


@pytest.fixture(scope="module")
def runs(start, tiny, plain_kernels, tmp_path_factory):
    """(run, saved parameters) of the launcher without memo flags and of a script without memo."""
    common = [*tiny, "--train-iters", "4", "--hidden-dropout", "0.1", "--split", "90,5,5"]
    save = ["--save-interval", "4", "--ckpt-format", "torch", "--no-save-optim", "--no-save-rng"]

    def go(*words):
        folder = tmp_path_factory.mktemp("stock")
        done = start(1, *words, *common, *save, "--save", str(folder))
        assert done.status == 0, done.err[-5000:]
        file = folder / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt"
        return done, torch.load(file, weights_only=False)["model"]

    return go(LAUNCHER), go("-m", "megatron_memo.platform", SCRIPT, *plain_kernels)


def test_losses_and_gradient_norms_are_those_of_a_script_without_memo(runs):
    (ours, _), (stock, _) = runs
    assert len(stock.logged) == 4
    assert ours.logged == stock.logged


def test_trained_parameters_are_bitwise_those_of_a_script_without_memo(runs):
    (_, ours), (_, stock) = runs
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name


def test_log_says_once_that_there_is_no_cuda_and_which_flags_were_added(runs):
    out = runs[0][0].out
    assert out.count("megatron_memo: no CUDA on this machine") == 1
    assert out.count("megatron_memo: no CUDA here: added --transformer-impl local") == 1


def test_upstream_modules_are_not_replaced(runs):
    assert "core attention of the layers are memo's" not in runs[0][0].out


def test_no_warning_of_a_cpu_generator_that_changed(runs):
    assert "CPU RNG state changed" not in runs[0][0].err + runs[0][0].out
