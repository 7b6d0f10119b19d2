"""From a stock command to the same one with memo it is one edit: one piece of it replaced."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_memo.platform import is_active

ROOT = Path(__file__).resolve().parents[2]
STOCK, MEMO = "pretrain_gpt.py", "pretrain_gpt_memo.py --memo-swap-ratio auto"
STEPS = 5
# A launch script that knows nothing of memo; without CUDA, Megatron needs the platform first.
_STOCK_SCRIPT = "from megatron_memo import platform\n\nplatform.activate()\n"

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")


@pytest.fixture(scope="module")
def command(tiny, plain_kernels):
    """The line that somebody has in a script of theirs."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 1"
    # Without dropout: a layer that works in several pieces draws other masks than in one.
    flags = [*tiny, *plain_kernels, "--num-layers", "3", "--hidden-dropout", "0"]
    flags += ["--train-iters", str(STEPS)]
    return f"{shlex.quote(sys.executable)} {torchrun} {STOCK} {shlex.join(flags)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The stock script and memo's, side by side."""
    found = tmp_path_factory.mktemp("folder")
    stock = Path(__file__).with_name("stock_script.py").read_text()
    (found / STOCK).write_text(_STOCK_SCRIPT + stock)
    shutil.copy(ROOT / "pretrain_gpt_memo.py", found)
    return found


def losses_of(line, folder):
    """Loss of each iteration as Megatron logs it, and all that was said."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [row for row in done.stdout.splitlines() if "lm loss:" in row and "iteration" in row]
    return [float(row.split("lm loss:")[1].split("|")[0]) for row in rows], done.stdout


def test_one_replacement_turns_it_into_memo_with_the_same_losses(command, folder):
    edited = command.replace(STOCK, MEMO)
    assert command.count(STOCK) == 1 and edited.replace(MEMO, STOCK) == command
    stock, said = losses_of(command, folder)
    assert len(stock) == STEPS and "megatron_memo: swap ratio" not in said
    memo, said = losses_of(edited, folder)
    assert "megatron_memo: swap ratio " in said
    # What Megatron logs has seven digits.
    assert memo == pytest.approx(stock, rel=1e-6)
