"""A run that has no room for what it moves is refused before it starts; what Megatron declares."""

import argparse
import sys
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_memo import compat
from megatron_memo.platform import is_active

LAUNCHER = Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py"


@pytest.fixture
def start_alone(run_words, tiny):
    """The launcher without torchrun, on the tiny model."""
    flags = ["--train-iters", "2", "--memo-resident-layers", "0"]
    return lambda *words: run_words([sys.executable, str(LAUNCHER), *tiny, *flags, *words])


def test_parameters_of_the_fullest_rank_are_upstreams_count():
    """12 h^2 for each of its layers, the embedding on the first stage, norms and biases aside."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(
        [
            *("--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "8"),
            *("--ffn-hidden-size", "4096", "--pipeline-model-parallel-size", "2"),
            "--use-distributed-optimizer",
        ]
    )
    args.kv_channels, args.padded_vocab_size, args.data_parallel_size = 128, 2048, 4
    args.expert_tensor_parallel_size, args.world_size, args.num_query_groups = 1, 8, None
    found = compat.parameters_of_fullest_rank(args)
    assert found == pytest.approx(4 * 12 * 1024**2 + 2048 * 1024, rel=0.01)
    assert args.num_query_groups is None  # upstream's function would have written into it


@pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")
def test_too_small_a_budget_is_refused_at_the_start_with_the_bill(start_alone):
    done = start_alone("--memo-swap-ratio", "1", "--memo-host-budget", "100KiB")
    assert done.status == 2
    (line,) = [row for row in done.err.splitlines() if "megatron-memo: error:" in row]
    assert "--memo-swap-ratio 1: needs " in line
    assert "a layer, 2 layers), and there are 100 KiB (--memo-host-budget 100KiB)" in line
    assert "--memo-resident-layers" in line
    assert "Traceback" not in done.err
