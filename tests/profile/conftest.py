"""Processes that profile a tiny model, and its flags."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_SHAPE = """
    --num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 256
    --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 2 --lr 1e-2
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 63
    --transformer-impl local --clip-grad 1e-6
"""
_LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2
"""
_STOCK = "--memo-modules memo"
_MEMO = "--memo-swap-ratio 0.5 --memo-chunks 4 --memo-resident-layers 1"

FLAGS = {
    "gpt-stock": [*_SHAPE.split(), *_STOCK.split()],
    "gpt-memo": [*_SHAPE.split(), *_MEMO.split()],
    "llama-stock": [*_SHAPE.split(), *_LLAMA.split(), *_STOCK.split()],
    "llama-memo": [*_SHAPE.split(), *_LLAMA.split(), *_MEMO.split()],
}


def start_process(*command: str) -> subprocess.Popen:
    """A process that Megatron takes for rank 0 of 1 (a command of ours sets others itself)."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    return subprocess.Popen(
        command, cwd="/", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen]:
    """``start(*command)``: its output in one pipe."""
    return start_process


@pytest.fixture(scope="session")
def flags() -> dict[str, list[str]]:
    """Flags of a tiny model, by style and kind of layers."""
    return FLAGS
