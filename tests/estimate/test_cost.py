"""Seconds of single steps: what they are made of, and which way they go."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from megatron_memo.estimate import flops
from megatron_memo.estimate.activations import layer_shape, saved
from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.job import Experts, Job
from megatron_memo.layer.footprint import footprint
from megatron_memo.layer.shape import LayerShape

A800 = Machine(gpu("a800-80g"))


def test_a_gpt_layer_saves_the_paper_s_16_units_and_llama_17(seven_b):
    unit = seven_b.unit_bytes
    bytes_saved = saved(seven_b, 1)
    assert bytes_saved.input + bytes_saved.attention == 2 * unit
    assert bytes_saved.others == pytest.approx(14 * unit, rel=1e-3)  # and the norms' statistics
    llama = replace(seven_b, ffn=14336, groups=8, gated=True, rms_norm=True)
    others = saved(llama, 1).total - saved(llama, 1).statistics
    assert others == pytest.approx(17 * unit, rel=1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(sequence_parallel=False, hidden_dropout=0.1),
        dict(swiglu=True, normalization="RMSNorm", num_query_groups=2, qk_layernorm=True),
        dict(swiglu=True, bias_swiglu_fusion=False, apply_rope_fusion=True),
        dict(position_embedding_type="learned_absolute", context_parallel_size=2),
    ],
)
def test_bytes_are_those_of_the_layer_s_own_list(flags):
    given = dict(
        num_layers=2,
        hidden_size=512,
        ffn_hidden_size=1408,
        num_attention_heads=8,
        kv_channels=64,
        group_query_attention="num_query_groups" in flags,
        seq_length=4096,
        micro_batch_size=2,
        padded_vocab_size=1024,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        normalization="LayerNorm",
        position_embedding_type="rope",
        rotary_percent=0.5,
        swiglu=False,
        bias_swiglu_fusion=True,
        bias_gelu_fusion=True,
        hidden_dropout=0.0,
    )
    args = Namespace(**{**given, **flags})
    job = Job.from_args(args, 8)
    for on_cuda in (True, False):
        theirs = LayerShape.from_args(args, on_cuda=on_cuda)
        assert layer_shape(job, 1, on_cuda=on_cuda) == theirs
        ours = saved(job, 1, on_cuda=on_cuda)
        assert (ours.always, ours.others) == (footprint(theirs).always, footprint(theirs).others)
        assert min(ours.qkv, ours.pre, ours.post) > 0


def test_without_sequence_parallelism_a_rank_saves_whole_rows(seven_b):
    plain = replace(seven_b, sequence_parallel=False)
    assert saved(plain, 1).input == 8 * saved(seven_b, 1).input
    assert saved(plain, 1).attention == saved(seven_b, 1).attention


def test_a_large_matrix_product_takes_its_operations_at_the_efficiency(seven_b):
    costs = Costs(seven_b, A800)
    n = 16384
    seconds = costs.gemm(n, n, n)
    assert seconds == pytest.approx(2 * n**3 / (312e12 * 0.75), rel=0.02)


def test_a_thin_matrix_product_is_bound_by_memory(seven_b):
    costs = Costs(seven_b, A800)
    weights = 2 * 8192 * 8192
    assert costs.gemm(1, 8192, 8192) == pytest.approx(weights / (2039e9 * 0.8), rel=0.01)


def test_working_in_chunks_costs_and_small_chunks_cost_more(seven_b):
    short = replace(seven_b, sequence=1 << 15)
    costs = Costs(short, A800)
    seconds = [costs.layer_forward(chunks=n) for n in (1, 8, 64, 512)]
    assert seconds == sorted(seconds)
    assert seconds[1] < 1.05 * seconds[0] and seconds[3] > 1.2 * seconds[0]


def test_tiles_that_do_not_fill_the_gpu_take_as_long_as_those_that_do(seven_b):
    costs = Costs(seven_b, A800)
    # 108, 110 and 216 tiles for 108 multiprocessors.
    seconds = [costs.gemm(128 * m, 1024, 128 * n) for m, n in ((12, 9), (10, 11), (12, 18))]
    assert seconds[1] == pytest.approx(seconds[2]) == pytest.approx(2 * seconds[0])


def test_without_sequence_parallelism_gradients_are_not_gathered_before_backward(seven_b):
    with_it = Costs(seven_b, A800).step("backward post", 1)
    without = Costs(replace(seven_b, sequence_parallel=False), A800).step("backward post", 1)
    assert without.serial == 0
    assert with_it.serial == with_it.beside == without.beside > 0


def test_attention_takes_half_of_the_square_forward_and_two_and_a_half_of_that_backward(seven_b):
    costs = Costs(seven_b, A800, Calibration(attention_forward=0.5, attention_backward=0.5))
    forward = costs.step("attention", 1).compute
    assert forward == pytest.approx(flops.attention(seven_b, causal=True) / (312e12 / 2))
    assert costs.step("backward attention", 1).compute == pytest.approx(2.5 * forward)


def test_running_the_mlp_again_stops_before_its_last_product(seven_b):
    costs = Costs(seven_b, A800)
    again, whole = costs.step("again post", 1), costs.step("post", 1)
    last = costs.gemm(seven_b.tokens, seven_b.ffn / 8, seven_b.hidden)
    assert again.compute < whole.compute - last
    assert again.serial == pytest.approx(whole.serial * 2 / 3)


def test_collectives_take_their_share_of_the_bytes_over_the_slowest_link(seven_b):
    costs = Costs(seven_b, A800)
    assert costs.collective(1e9, 1) == 0
    assert costs.collective(1e9, 8) == pytest.approx(7 / 8 * 1e9 / (200e9 * 0.8))
    assert costs.collective(1e9, 16) == pytest.approx(15 / 16 * 1e9 / (25e9 * 0.8))
    # Two ranks of different nodes, eight apart.
    assert costs.collective(1e9, 2, 8) == pytest.approx(1 / 2 * 1e9 / (25e9 * 0.8))


def test_ring_attention_sends_beside_compute_and_ulysses_between(seven_b):
    ring = Costs(replace(seven_b, tp=4, cp=2), A800).step("attention", 1)
    assert ring.ring > 0 and ring.exchange == 0
    ulysses = Costs(replace(seven_b, tp=4, cp=2, cp_kind="a2a"), A800).step("attention", 1)
    assert ulysses.exchange > 0 and ulysses.ring == 0
    assert ring.compute == pytest.approx(ulysses.compute)


def test_hiding_tensor_parallel_communication_saves_what_the_calibration_says(seven_b):
    shown = Costs(seven_b, A800).step("post", 1)
    hidden = Costs(replace(seven_b, overlap_tp=True), A800, Calibration(tp_hidden=0.25))
    assert hidden.step("post", 1).serial == pytest.approx(0.75 * shown.serial)
    assert hidden.step("post", 1).compute == shown.compute


def test_experts_cost_what_a_token_visits_and_the_exchange(seven_b):
    experts = Experts(8, 2, 8192, 0, parallel=8, every=(True,) * 32, tp=1)
    sparse = Costs(replace(seven_b, experts=experts), A800)
    before, after = sparse.step("post", 1), sparse.step("experts", 1)
    dense = Costs(seven_b, A800).step("post", 1)
    assert before.compute + after.compute == pytest.approx(dense.compute, rel=0.1)
    sent = 2 * seven_b.local_tokens * seven_b.hidden * 2  # bytes of a rank's tokens, twice each
    assert after.serial == pytest.approx(2 * sparse.collective(sent, 8))
    assert 0 < before.serial < dense.serial
    once = sparse.step("again experts", 1)  # where the tokens are already
    assert 0.8 * after.compute < once.compute < after.compute and once.serial == 0
    twice = sparse.step("backward experts", 1)
    assert twice.compute == pytest.approx(2 * after.compute, rel=0.1)


def test_memo_s_loss_head_computes_logits_twice(seven_b):
    costs = Costs(seven_b, A800)
    stock, ours = costs.head(True, None), costs.head(True, 64)
    product = costs.gemm(seven_b.tokens, seven_b.hidden, seven_b.vocabulary / 8)
    assert ours.compute > stock.compute + product
    assert costs.head(False, 64).compute == pytest.approx(costs.head(False, None).compute, rel=0.02)


def test_fp32_runs_at_half_the_rate(seven_b):
    half, full = Costs(seven_b, A800), Costs(replace(seven_b, element_bytes=4), A800)
    ratio = full.step("attention", 1).compute / half.step("attention", 1).compute
    assert ratio == pytest.approx(2)
