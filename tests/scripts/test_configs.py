"""The models' configs: Megatron takes them, memo takes them, and they fit what they are for."""

import os
import sys

import pytest

from megatron_memo import platform
from megatron_memo.swap.host_budget import HostBudget
from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from lib.config import check_ranks, read_config

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
LENGTHS = {"128k": 1 << 17, "256k": 1 << 18, "512k": 1 << 19, "1m": 1 << 20}
LARGE = [path for path in CONFIGS if path.stem.rpartition("-")[2] in LENGTHS]
HOST_BYTES_OF_A_NODE = 2 << 40
# layers, hidden, ffn, heads, groups, vocabulary: the MEMO paper's table 2; the models' own configs
SHAPES = {
    "gpt-7b": (32, 4096, 16384, 32, None, 50257),
    "gpt-13b": (40, 5120, 20480, 40, None, 50257),
    "gpt-30b": (48, 7168, 28672, 56, None, 50257),
    "gpt-65b": (80, 8192, 32768, 64, None, 50257),
    "llama-3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": (80, 8192, 28672, 64, 8, 128256),
    "qwen-2.5-14b": (48, 5120, 13824, 40, 8, 152064),
}


@pytest.fixture
def megatron(monkeypatch):
    """`megatron(config, *extra)`: arguments as Megatron validates them and memo checks them."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron_memo.arguments import check_memo_words
    from megatron_memo.training.command_line import (
        ARGS_DEFAULTS,
        add_arguments,
        check_before_start,
        check_validated,
    )
    from megatron_memo.training.cpu_defaults import follow_cpu

    # A run leaves a twentieth of a node's memory as head-room; see swap.host_budget.
    share = HOST_BYTES_OF_A_NODE // 8 * 19 // 20
    node = HostBudget(share, "the node that the configs are for")
    monkeypatch.setattr("megatron_memo.training.host_memory.host_budget", lambda args: node)

    def parse(config, *extra):
        words = config.flags(extra)
        ranks = config.nodes * config.ranks_per_node
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_memo.py", *words])
        for name, value in {**config.environment, "RANK": "0", "WORLD_SIZE": str(ranks)}.items():
            monkeypatch.setitem(os.environ, name, value)
        check_memo_words(words)
        args = parse_args(extra_args_provider=add_arguments)
        if platform.is_active():
            follow_cpu(args)
        check_before_start(args)
        validate_args(args, dict(ARGS_DEFAULTS))
        args.padded_vocab_size = args.vocab_size  # the tokenizer's business
        check_validated(args)
        return args

    return parse


def name_of(path):
    return path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_megatron_and_memo_take_it_and_what_always_moves_has_room(path, megatron):
    config = read_config(path)
    extra = () if path in LARGE else ("--memo-swap-ratio", "0.5")
    args = megatron(config, "--mock-data", *extra)
    ranks = config.nodes * config.ranks_per_node
    assert args.world_size == ranks
    check_ranks(config, ranks, config.flags())
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert args.num_layers % args.pipeline_model_parallel_size == 0
    assert args.max_position_embeddings >= args.seq_length


@pytest.mark.parametrize("path", LARGE, ids=name_of)
def test_it_is_what_its_name_says(path):
    model, _, length = path.stem.rpartition("-")
    config = read_config(path)
    flags = {flag: (words or ("",))[0] for flag, words in config.arguments.items()}
    layers, hidden, ffn, heads, groups, vocabulary = SHAPES[model]
    assert int(flags["--seq-length"]) == LENGTHS[length]
    shape = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads")
    assert [int(flags[flag]) for flag in shape] == [layers, hidden, ffn, heads]
    assert flags.get("--num-query-groups") == (None if groups is None else str(groups))
    assert int(flags["--vocab-size"]) + 1 == vocabulary
    assert 8 <= config.nodes * config.ranks_per_node <= 64
