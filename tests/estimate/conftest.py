"""The jobs that many tests ask about."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_memo.estimate.job import Job

ROOT = Path(__file__).resolve().parents[2]

# The paper's 7B model at 1M tokens on one node.
SEVEN_B = Job(
    layers=32,
    hidden=4096,
    ffn=16384,
    heads=32,
    head_dim=128,
    groups=32,
    vocabulary=51200,
    sequence=1 << 20,
    tp=8,
    sequence_parallel=True,
    distributed_optimizer=True,
)


@pytest.fixture
def seven_b():
    return SEVEN_B


@pytest.fixture
def small():
    """Eight layers at 32K tokens on two ranks, quick to simulate."""
    return replace(SEVEN_B, layers=8, sequence=1 << 15, tp=2)


@pytest.fixture
def quickstart():
    """Megatron's flags of the quickstart's model."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from lib.config import read_config

    return read_config(ROOT / "configs" / "quickstart.yaml").flags()
