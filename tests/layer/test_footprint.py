"""What a layer moves to host memory, told from its shape alone, against what the engine moved."""

import dataclasses
from argparse import Namespace

import pytest
import torch

from megatron_memo.config import MemoConfig
from megatron_memo.layer.footprint import footprint, moved_bytes
from megatron_memo.layer.shape import LayerShape

# One rank of 8 of a 7B model at 1M tokens (MEMO, arXiv 2407.12117), without RoPE and dropout.
PAPER = LayerShape(
    tokens=2**20, shared_by=8, hidden=4096, ffn=2048, heads=4, groups=4, head_dim=128, itemsize=2
)
UNIT = 2**20 * 4096 // 8 * 2  # bytes of b s h / tp elements


@pytest.mark.timeout(900)  # the first test that asks runs the scenarios
@pytest.mark.parametrize("ranks", [1, 2], ids=lambda ranks: f"tp{ranks}")
@pytest.mark.parametrize("layers", ["footprints", "latent_footprints"])
def test_every_byte_that_a_layer_moves_is_told_from_its_shape(answers, layers, ranks):
    for row in (row for rank in answers(layers, ranks) for row in rank):
        assert row["counted"] == row["told"], row["case"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [("expert_footprints", 1), ("expert_footprints", 2), ("expert_footprints_over_ranks", 2)],
)
def test_what_experts_move_is_told_from_above_by_a_few_per_cent(answers, scenario, ranks):
    """Where ranks have different experts, one gets more tokens than another: on the average."""
    for rows in zip(*answers(scenario, ranks), strict=True):
        for counted, told in zip(
            (
                sum(column) / len(rows)
                for column in zip(*(row["counted"] for row in rows), strict=True)
            ),
            rows[0]["told"],
            strict=True,
        ):
            assert 0.999 * counted <= told <= 1.06 * counted, rows[0]


def test_the_papers_layer_saves_the_papers_16_units():
    """MEMO counts 16 b s h elements, without a norm's statistics and the log-sum-exp."""
    found = footprint(PAPER)
    lse, statistics = 4 * 2**20 * 4, 4 * (2**20 // 8) * 4
    assert found.always == 2 * UNIT + lse
    assert found.others == 14 * UNIT + statistics
    assert found.moved(0.5) == found.always + found.others // 2


def test_a_ratio_moves_the_part_of_the_others_that_its_rows_are():
    whole = footprint(PAPER)
    for ratio in (0.0, 0.25, 1.0):
        settings = MemoConfig(ratio, chunks=8, min_swap_bytes=0)
        assert moved_bytes(PAPER, settings) == whole.moved(ratio)


def test_on_cuda_rms_norm_and_dropout_save_less_than_on_cpu():
    for change in (dict(rms_norm=True), dict(dropout=True)):
        shape = dataclasses.replace(PAPER, **change)
        on_cpu = dataclasses.replace(shape, on_cuda=False)
        assert footprint(shape).others < footprint(on_cpu).others


def test_the_shape_is_read_from_megatrons_arguments():
    args = Namespace(
        seq_length=8192,
        context_parallel_size=2,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        micro_batch_size=3,
        hidden_size=512,
        ffn_hidden_size=1024,
        num_attention_heads=16,
        group_query_attention=True,
        num_query_groups=8,
        kv_channels=32,
        params_dtype=torch.bfloat16,
        normalization="RMSNorm",
        qk_layernorm=False,
        position_embedding_type="rope",
        rotary_percent=0.5,
        apply_rope_fusion=False,
        swiglu=True,
        bias_swiglu_fusion=True,
        bias_gelu_fusion=False,
        hidden_dropout=0.1,
    )
    assert LayerShape.from_args(args, on_cuda=True) == LayerShape(
        tokens=4096,
        shared_by=4,
        batch=3,
        hidden=512,
        ffn=256,
        heads=4,
        groups=2,
        head_dim=32,
        itemsize=2,
        rms_norm=True,
        rotary_dim=16,
        gated=True,
        fused_activation=True,
        dropout=True,
    )
    args.apply_rope_fusion, args.sequence_parallel, args.group_query_attention = True, False, False
    shape = LayerShape.from_args(args, on_cuda=True)
    assert (shape.rotary_dim, shape.shared_by, shape.groups) == (0, 1, 4)
    args.sft = True
    shape = LayerShape.from_args(args, on_cuda=True)
    assert (shape.tokens, shape.batch) == (3 * 4096, 1)  # one row of all samples
