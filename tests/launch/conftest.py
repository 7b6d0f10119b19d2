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

from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = str(ROOT / "pretrain_gpt_memo.py")

# Nothing here is about the CPU: what a machine without CUDA needs, the launcher adds by itself.
# Sizes are the smallest at which a chunk's activations are worth a copy (config.min_swap_bytes).
_TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 256
    --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2
    --lr-decay-style constant --clip-grad 1.0 --attention-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 63 --log-interval 1 --eval-interval 5
    --eval-iters 1 --log-throughput --num-workers 0 --split 90,5,5
"""
_LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2
"""
# What Megatron's launch script does not know about a machine without CUDA.
_PLAIN_KERNELS = """
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
"""
TINY = {"gpt": _TINY.split(), "llama": [*_TINY.split(), *_LLAMA.split()]}
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
    def validation(self) -> dict[int, float]:
        """Validation loss by iteration, as Megatron logs it."""
        pattern = r"validation loss at iteration (\d+) \| lm loss value: (\S+)"
        return {int(step): float(loss) for step, loss in re.findall(pattern, self.out)}

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


def forked(ranks: int, script: str, *words: str, report: Path | None = None) -> Run:
    """What torchrun would do, in a fifth of the time; status is that of the first rank to fail."""
    done = run_ranks(ranks, script, words, timeout=240)
    content = json.loads(report.read_text()) if report is not None and report.exists() else None
    return Run(done.returncode, done.stdout, done.stderr, content)


@pytest.fixture(scope="session")
def start() -> Callable[..., Run]:
    """``start(ranks, *words)``: torchrun with exactly these words, where the launch matters."""
    return torchrun


@pytest.fixture(scope="session")
def attempt() -> Callable[..., Run]:
    """``attempt(ranks, *words)``: a script on so many ranks, which may fail."""
    return forked


@pytest.fixture(scope="session")
def run_words() -> Callable[..., Run]:
    """``run_words([...])``: a command of these words."""
    return run_command


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """``train(ranks, style, *flags)``: the launcher on a tiny model, which has to succeed."""

    def run(ranks: int, style: str, *flags: str) -> Run:
        report = tmp_path_factory.mktemp("report") / "report.json"
        words = [*TINY[style], *flags, "--memo-report", str(report)]
        done = forked(ranks, LAUNCHER, *words, report=report)
        assert done.status == 0, f"{done.out[-3000:]}\n{done.err[-5000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def rounding() -> Callable[[dict[int, float], dict[int, float], float], None]:
    """``rounding(losses, reference, fraction)``: a curve is another one, roundings excepted.

    They may differ by ``fraction`` of the loss itself, for forward's roundings, and of the way
    that the reference has gone up and down until then, for those of the updates.
    """

    def check(losses: dict[int, float], reference: dict[int, float], fraction: float) -> None:
        assert losses.keys() == reference.keys()
        way, last = 0.0, reference[min(reference)]
        for step, loss in reference.items():
            way, last = way + abs(loss - last), loss
            assert abs(losses[step] - loss) <= fraction * (loss + way), step

    return check


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Megatron flags of the tiny Llama-style model."""
    return TINY["llama"]


@pytest.fixture(scope="session")
def plain_kernels() -> list[str]:
    """Flags that the launcher adds on a machine without CUDA and other scripts have to give."""
    return PLAIN_KERNELS
