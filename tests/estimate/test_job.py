"""What is trained and how it is laid out: read from Megatron's flags, checked, counted."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_memo.estimate import flops
from megatron_memo.estimate.job import Experts, Job

ARGS = dict(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=4096,
    micro_batch_size=2,
    global_batch_size=32,
    vocab_size=50256,
    tokenizer_type="NullTokenizer",
    bf16=True,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=2,
    context_parallel_size=1,
    sequence_parallel=True,
)


def job(world_size=16, **changes):
    return Job.from_args(Namespace(**{**ARGS, **changes}), world_size)


def test_flags_that_are_not_given_are_what_megatron_makes_of_them():
    found = job()
    assert (found.ffn, found.head_dim, found.groups) == (16384, 128, 32)
    assert (found.tp, found.pp, found.dp, found.micro_batches) == (4, 2, 2, 8)
    assert found.vocabulary == 50688  # 50257 to a multiple of 128 * 4
    assert found.element_bytes == 2
    assert job(swiglu=True).ffn == 10880
    assert job(group_query_attention=True, num_query_groups=8).groups == 8
    assert job(num_query_groups=1).groups == 32  # as Megatron: without the flag it is not read


def test_validated_arguments_are_taken_as_they_are():
    found = job(
        padded_vocab_size=60000, ffn_hidden_size=1024, kv_channels=64, world_size=16, fp16=False
    )
    assert (found.vocabulary, found.ffn, found.head_dim) == (60000, 1024, 64)
    assert found.query == 2048


@pytest.mark.parametrize(
    ("changes", "world", "part"),
    [
        ({}, 12, "the number of GPUs 12: does not divide by .* 8. Use a multiple, such as 8 or 16"),
        ({"num_attention_heads": 30}, 16, "--num-attention-heads 30: .*parallel-size 4"),
        ({"num_layers": 33}, 16, "--num-layers .*33: .*--pipeline-model-parallel-size 2"),
        ({"global_batch_size": 30}, 16, "--global-batch-size 30: .* 4"),
        ({"seq_length": 4098}, 16, "--seq-length .*4098: .*--tensor-model-parallel-size 4"),
        ({"context_parallel_size": 2, "seq_length": 4098}, 16, "--context-parallel-size 4"),
        ({"ffn_hidden_size": 1023}, 16, "--ffn-hidden-size 1023: .* 4"),
        (
            {"group_query_attention": True, "num_query_groups": 3},
            16,
            "--num-attention-heads 32: .*--num-query-groups 3",
        ),
        ({"num_layers": None}, 16, "--num-layers is needed"),
        ({"num_layers": 0}, 16, "--num-layers 0: must be at least 1"),
        ({"num_attention_heads": 0}, 16, "--num-attention-heads 0: must be at least 1"),
        ({"micro_batch_size": -2}, 16, "--micro-batch-size -2: must be at least 1"),
        ({"tensor_model_parallel_size": -4}, 16, "--tensor-model-parallel-size -4: must be"),
        ({"vocab_size": None}, 16, "vocabulary is not known"),
        ({"yaml_cfg": "run.yaml"}, 16, "--yaml-cfg: the estimate"),
        ({"pipeline_model_parallel_layout": "Et*9|t*9L"}, 16, "has 18 layers and --num-layers is"),
        ({"pipeline_model_parallel_layout": "Et*16|t*16mL"}, 16, "multi-token prediction"),
        ({"pipeline_model_parallel_layout": "t*16|t*16L"}, 16, "must begin with E"),
        ({"pipeline_model_parallel_layout": "Et|t*30|tL"}, 16, "--pipeline-model-parallel-layout"),
        (
            {"num_experts": 8, "expert_model_parallel_size": 8, "tensor_model_parallel_size": 4},
            16,
            "a pipeline stage 8: .*--expert-tensor-parallel-size 32",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 3},
            16,
            "the layers of a stage 16: .*--num-layers-per-virtual-pipeline-stage 3",
        ),
        ({"decoder_first_pipeline_num_layers": 40}, 16, "--decoder-first-pipeline-num-layers 40"),
    ],
)
def test_impossible_layouts_are_refused_with_the_divisor_that_is_wrong(changes, world, part):
    with pytest.raises(ValueError, match=part):
        job(world, **changes)


def test_every_layer_belongs_to_one_model_chunk(seven_b):
    layouts = [
        dict(pp=4),
        dict(pp=4, virtual=2),
        dict(pp=4, first_layers=2, last_layers=6),
        dict(pp=2, embedding_as_layer=True, loss_as_layer=True, virtual=1),
    ]
    for layout in layouts:
        one = replace(seven_b, **layout)
        places = [(stage, v) for v in range(one.virtual) for stage in range(one.pp)]
        layers = [layer for place in places for layer in one.layers_of(*place)]
        assert layers == list(range(1, 33))
    uneven = replace(seven_b, pp=4, first_layers=2, last_layers=6)
    assert [len(uneven.layers_of(s)) for s in range(4)] == [2, 12, 12, 6]
    interleaved = replace(seven_b, pp=4, virtual=2)
    assert interleaved.layers_of(1, 1) == range(21, 25)


def test_operations_of_7b_at_1m_are_those_of_the_paper(seven_b):
    assert flops.linear(seven_b, 1) == pytest.approx(0.0528e15, rel=1e-3)
    assert flops.attention(seven_b, causal=False) == pytest.approx(2.2518e15, rel=1e-3)
    assert flops.attention(seven_b, causal=True) == flops.attention(seven_b, causal=False) / 2
    # 52.30% of eight times 312 TFLOP/s: 1357 s if attention counts in full, 694 s if causal.
    for causal, seconds in ((False, 1357), (True, 694)):
        found = flops.mfu(seven_b, seconds, 312e12, causal=causal)
        assert found == pytest.approx(0.5230, abs=0.002)


def test_operations_do_not_depend_on_the_layout(seven_b):
    whole = flops.of_iteration(replace(seven_b, tp=1, sequence_parallel=False), causal=True)
    for layout in (dict(tp=4, cp=2), dict(pp=4), dict(tp=2, sequence_parallel=False)):
        split = replace(seven_b, **layout)
        assert flops.of_iteration(split, causal=True) == pytest.approx(whole)
    doubled = replace(seven_b, dp=2, micro_batches=3)
    assert flops.of_iteration(doubled, causal=True) == pytest.approx(6 * whole)


def test_a_unit_is_one_gib_for_7b_at_1m(seven_b):
    assert seven_b.unit_bytes == 1 << 30


def test_weights_add_up_to_the_model(seven_b):
    whole = replace(seven_b, tp=1, sequence_parallel=False)
    # 12 h^2 a layer and the embedding, with norms and biases: 6.65 billion.
    assert whole.parameters(0) == pytest.approx(12 * 32 * 4096**2 + 51200 * 4096, rel=1e-3)
    staged = replace(whole, pp=4)
    assert sum(map(staged.parameters, range(4))) == whole.parameters(0) + 51200 * 4096


def test_a_token_visits_some_of_the_experts_and_a_rank_holds_its_share(seven_b):
    experts = Experts(8, 2, 2048, 0, parallel=4, every=(True, False) * 16, tp=1)
    sparse = replace(seven_b, experts=experts)
    assert flops.mlp(sparse, 2) == flops.mlp(seven_b, 2)
    assert flops.mlp(sparse, 1) == pytest.approx(flops.mlp(seven_b, 1) * 2 * 2048 / 16384)
    own = sparse.expert_parameters(1)
    assert own == 2 * 4096 * 2048 * 2 and sparse.expert_parameters(2) == 0
    assert own < sparse.layer_parameters(1)
    assert sparse.expert_share == 2  # of eight ranks, four have other experts


def test_a_custom_layout_says_which_layers_a_stage_has():
    found = job(pipeline_model_parallel_layout="Et*10|t*22L")
    assert [len(found.layers_of(stage)) for stage in range(2)] == [10, 22]
    virtual = job(pipeline_model_parallel_layout="Et*4|t*6|t*10|t*12L")
    assert virtual.virtual == 2 and virtual.layers_of(1, 0) == range(5, 11)
    assert virtual.layers_of(1, 1) == range(21, 33)


def test_latent_attention_is_read_from_its_own_flags():
    latent = dict(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, v_head_dim=128)
    found = job(multi_latent_attention=True, qk_pos_emb_head_dim=64, **latent)
    assert (found.query, found.key, found.value) == (32 * 192, 32 * 192, 32 * 128)
    assert found.attended == 32 * 128 and found.saved_rope == 64
    down, up = 4096 * (1536 + 512 + 64), 1536 * 32 * 192 + 512 * 32 * 256
    assert flops.qkv(found) == 2 * found.tokens * (down + up) / 4
    assert flops.attention(found, causal=False) == 2 * 2 * 4096**2 * 32 * (192 + 128) / 4
