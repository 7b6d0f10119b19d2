"""Makes docs/recorded/: what commands of these pages print, so that no output is typed by hand.

    python docs/record.py             all, some three minutes on two cores without a GPU
    python docs/record.py NAME ...    some of them

Each recording begins with the command that it is of. tests/docs/test_recorded.py runs the small
ones again and compares everything but numbers.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "recorded"

# The smallest job that does all that a large one does.
_TINY = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256
    --group-query-attention --num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 2
    --train-iters 16 --lr 1e-3 --lr-decay-style constant --mock-data --split 100,0,0
    --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 1000
    --eval-iters 0 --num-workers 0
"""
# The MEMO paper's 7B model at 1M tokens on 8 GPUs, as docs/guide.md has it.
_LARGE = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
    --seq-length 1048576 --max-position-embeddings 1048576 --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 1 --bf16 --use-distributed-optimizer
    --tensor-model-parallel-size 8 --sequence-parallel --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4 --train-iters 1000
    --eval-iters 0 --eval-interval 1000 --transformer-impl local --mock-data
"""
TINY, LARGE = _TINY.split(), _LARGE.split()
AUTO = ["--memo-swap-ratio", "auto"]
_MACHINE = ["--gpu", "a800-80g", "--host-memory", "2TiB"]
ESTIMATE = ["estimate", "--quick", *_MACHINE, "--", *LARGE, *AUTO]


def training(*flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One rank of `pretrain_gpt_memo.py` on this machine, with `folder` as working folder."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt_memo.py"), *flags],
        env={**os.environ, **alone, **meeting, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


_SHOWN = ("iteration  ", "elapsed time per iteration", "lm loss:")


def told(output: str) -> list[str]:
    """The lines of a training run that are memo's, and those of its iterations without the date."""
    lines, table = [], 0
    for line in output.splitlines():
        table -= 1
        if line.startswith("megatron_memo: "):
            lines.append(line)
            table = 4 if line.endswith("on the rank that has most:") else 0
        elif table > 0:
            lines.append(line)
        elif " iteration " in line and "lm loss" in line:
            iteration = line.partition("]")[2].split("|")
            kept = [part for part in iteration if any(word in part for word in _SHOWN)]
            lines.append("|".join(kept).rstrip())
    return lines


SAVED = ["--save", "runs/first", "--load", "runs/first", "--save-interval", "100"]


def first_run(folder: Path) -> str:
    flags = [*AUTO, "--memo-plan", "auto", *SAVED, "--exit-interval", "8"]
    return _trained(flags, folder)


def resumed_run(folder: Path) -> str:
    first_run(folder)
    return _trained([*AUTO, "--memo-plan", "auto", *SAVED, "--exit-interval", "12"], folder)


def refused(folder: Path) -> str:
    flags = [*AUTO, "--cpu-offloading-num-layers", "1"]
    return _shown_command(flags) + training(*TINY, *flags, folder=folder).stderr.strip() + "\n"


def estimate(folder: Path) -> str:
    words = [
        "estimate",
        "--quick",
        "--gpu",
        "a800-80g",
        "--host-memory",
        "2TiB",
        "--",
        *LARGE,
        *AUTO,
    ]
    return _command(words, folder)


def planned(folder: Path) -> str:
    profile = ["profile", "-o", "traces", "--", *LARGE, "--memo-swap-ratio", "0.3"]
    plan = ["plan", "traces", "-o", "plans"]
    verify = ["verify", "plans/rank-0.plan.jsonl", "traces/rank-0.trace.jsonl.gz"]
    return "\n".join(_command(words, folder) for words in (profile, plan, verify))


def lr_scale(folder: Path) -> str:
    rates = ["--rate", "0.5M:2e-4", "--rate", "2M:3e-4", "--spacing", "1.5"]
    return _command(["lr-scale", *rates, "--batch", "64x128Ki"], folder)


RECORDINGS: dict[str, Callable[[Path], str]] = {
    "first_run": first_run,
    "resumed_run": resumed_run,
    "refused": refused,
    "estimate": estimate,
    "planned": planned,
    "lr_scale": lr_scale,
}


def _trained(flags: Sequence[str], folder: Path) -> str:
    done = training(*TINY, *flags, folder=folder)
    if done.returncode:
        sys.exit(done.stderr)
    return _shown_command(flags) + "\n".join(told(done.stdout)) + "\n"


def _shown_command(flags: Sequence[str]) -> str:
    return f"$ torchrun --nproc-per-node 1 pretrain_gpt_memo.py $FLAGS {shlex.join(flags)}\n"


def _command(words: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_memo.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    line = shlex.join(words).replace(shlex.join(LARGE), "$FLAGS")
    return f"$ megatron-memo {line}\n{done.stdout.rstrip()}\n"


def main(names: Sequence[str]) -> None:
    """Write the recordings of these names; all without any."""
    unknown = set(names) - set(RECORDINGS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(RECORDINGS)}")
    for name in names or RECORDINGS:
        with tempfile.TemporaryDirectory() as folder:
            text = RECORDINGS[name](Path(folder))
        (FOLDER / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
