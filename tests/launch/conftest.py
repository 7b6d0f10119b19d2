"""Training runs as a user starts them: torchrun, Megatron's pretrain, a tiny model."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = str(ROOT / "pretrain_gpt_memo.py")

# Nothing here is about the CPU: what a machine without CUDA needs, the launcher adds by itself.
_TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 4 --lr 1e-2
    --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 63 --log-interval 1 --eval-interval 2
    --eval-iters 1 --log-throughput --num-workers 0
"""
# What Megatron's launch script does not know about a machine without CUDA.
_PLAIN_KERNELS = """
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
"""
TINY = _TINY.split()
PLAIN_KERNELS = _PLAIN_KERNELS.split()


@dataclass(frozen=True)
class Run:
    """A finished command: status, output, errors, and its report if it made one."""

    status: int
    out: str
    err: str
    report: dict[str, Any] | None

    @property
    def losses(self) -> dict[int, float]:
        """Exact loss of each iteration, from the report."""
        assert self.report is not None
        return {row["iteration"]: row["lm_loss"] for row in self.report["iterations"]}

    @property
    def logged(self) -> list[str]:
        """Loss and gradient norm of each iteration as Megatron logs them."""
        pattern = r"iteration +(\d+)/.*lm loss: (\S+).*grad norm: (\S+)"
        return [" ".join(found) for found in re.findall(pattern, self.out)]


def run_command(command: Sequence[str], report: Path | None = None) -> Run:
    """Run ``command`` in a folder-independent way; never raises for its status."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=env, cwd="/", check=False
    )
    content = json.loads(report.read_text()) if report is not None and report.exists() else None
    return Run(done.returncode, done.stdout, done.stderr, content)


def torchrun(ranks: int, *words: str, report: Path | None = None) -> Run:
    """``torchrun`` on this machine, on a free port."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run_command([*start, "--nproc-per-node", str(ranks), *words], report)


@pytest.fixture(scope="session")
def start() -> Callable[..., Run]:
    """``start(ranks, *words)``: torchrun with exactly these words."""
    return torchrun


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """``train(ranks, *flags)``: the launcher on the tiny model, which has to succeed."""

    def run(ranks: int, *flags: str) -> Run:
        report = tmp_path_factory.mktemp("report") / "report.json"
        done = torchrun(ranks, LAUNCHER, *TINY, *flags, "--memo-report", str(report), report=report)
        assert done.status == 0, f"{done.out[-3000:]}\n{done.err[-5000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Megatron flags of the tiny model."""
    return TINY


@pytest.fixture(scope="session")
def plain_kernels() -> list[str]:
    """Flags that the launcher adds on a machine without CUDA and other scripts have to give."""
    return PLAIN_KERNELS


@pytest.fixture(scope="session")
def run_words() -> Callable[..., Run]:
    """``run_words(*command)``: exactly this command."""
    return lambda *command: run_command(command)
