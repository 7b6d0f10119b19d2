"""What a rank may take of the host, what it needs, and what is said when that is more."""

import argparse
import re

import pytest
import torch

from megatron_memo import compat
from megatron_memo.config import MemoConfig
from megatron_memo.layer.footprint import host_bytes
from megatron_memo.layer.shape import LayerShape
from megatron_memo.sizes import size_words
from megatron_memo.swap.disk import staging_bytes
from megatron_memo.swap.host_budget import bill, check_fits, declared, host_budget, host_need
from megatron_memo.training.host_memory import with_host_memory

GIB = 1 << 30


def args(**changes):
    """Megatron's arguments for 8 layers of b s h = 2^22 elements."""
    plain = dict(
        memo_swap_ratio="1",
        memo_chunks="1",
        memo_resident_layers="0",
        memo_host_budget=None,
        seq_length=4096,
        micro_batch_size=1,
        global_batch_size=8,
        data_parallel_size=2,
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
        kv_channels=128,
        params_dtype=torch.bfloat16,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        rotary_percent=1.0,
        bias_swiglu_fusion=True,
        bias_gelu_fusion=True,
        hidden_dropout=0.0,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        pipeline_model_parallel_size=1,
        num_workers=0,
    )
    return argparse.Namespace(**plain | changes)


def memo_of(parsed):
    return MemoConfig(float(parsed.memo_swap_ratio), chunks=1, resident_layers=0)


@pytest.fixture
def machine(tmp_path):
    """machine(bytes): the root of a machine that has so many left."""

    def make(nbytes):
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {nbytes // 1024} kB\n")
        return tmp_path

    return make


def test_ranks_of_a_node_share_it_and_head_room_stays(machine):
    found = host_budget(args(), root=machine(800 * GIB), env={"LOCAL_WORLD_SIZE": "8"})
    assert found.bytes == 95 * GIB  # a twentieth stays
    assert "MemAvailable" in found.origin
    assert "shared by 8 ranks" in found.origin
    assert "5 GiB head-room" in found.origin


def test_head_room_is_a_gib_of_a_small_machine_and_a_quarter_of_a_tiny_one(machine):
    assert host_budget(args(), root=machine(8 * GIB), env={}).bytes == 7 * GIB
    assert host_budget(args(), root=machine(GIB), env={}).bytes == GIB * 3 // 4


def test_a_size_is_for_the_node_and_nothing_is_taken_off(machine):
    given = args(memo_host_budget="1TiB", num_workers=8)
    found = host_budget(given, root=machine(2048 * GIB), env={"LOCAL_WORLD_SIZE": "8"})
    assert found.bytes == 128 * GIB
    assert found.origin == "--memo-host-budget 1TiB, shared by 8 ranks"


def test_a_size_that_is_none_is_said_to_be_none(machine):
    with pytest.raises(
        ValueError, match=r"--memo-host-budget much: must be a size such as .* auto"
    ):
        host_budget(args(memo_host_budget="much"), root=machine(GIB), env={})


def test_more_than_the_node_has_is_refused(machine):
    given = args(memo_host_budget="64GiB")
    budget = host_budget(given, root=machine(32 * GIB), env={})
    with pytest.raises(ValueError, match="leaves 32 GiB to each rank and the flag gives it 64 GiB"):
        check_fits(given, memo_of(given), budget)


@pytest.fixture
def million_parameters(monkeypatch):
    monkeypatch.setattr(compat, "parameters_of_fullest_rank", lambda args: 1_000_000)


def test_what_megatron_declares_is_taken_off(machine, million_parameters):
    offload = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert set(declared(args(**offload)).values()) == {8_000_000, 0}
    shared = args(**offload, use_distributed_optimizer=True)
    assert set(declared(shared).values()) == {4_000_000, 0}
    saving = args(save="somewhere", async_save=True, use_distributed_optimizer=True)
    assert set(declared(saving).values()) == {8_000_000, 0}  # 2 + 12 / 2 bytes each
    assert set(declared(args(save="somewhere")).values()) == {0}
    both = args(**offload, num_workers=2)
    root = machine(8 * GIB)
    less = host_budget(args(), root=root, env={}).bytes - host_budget(both, root=root, env={}).bytes
    assert less == 8_000_000 + 2 * 256 * 2**20


def test_need_is_a_layers_bytes_times_layers_times_micro_batches_in_flight():
    one = args()
    a_layer = host_bytes(LayerShape.from_args(one, on_cuda=False), memo_of(one))
    assert host_need(one, 1.0) == 8 * a_layer
    assert host_need(args(pipeline_model_parallel_size=4), 1.0) == 2 * 4 * a_layer
    assert 8 * a_layer > host_need(one, 0.5) > host_need(one, 0.0) > 0


EXPERTS = dict(
    num_experts=16,
    moe_router_topk=2,
    moe_ffn_hidden_size=512,
    moe_layer_freq=[0] + [1] * 7,
    expert_model_parallel_size=4,
)


def test_layers_with_experts_and_dense_ones_are_billed_each_for_itself():
    given = args(**EXPERTS)
    dense, mixed = (
        host_bytes(LayerShape.from_args(given, on_cuda=False, experts=which), memo_of(given))
        for which in (False, True)
    )
    assert host_need(given, 1.0) == dense + 7 * mixed
    kept = args(**EXPERTS, memo_moe_experts="keep")
    assert host_need(kept, 1.0) < host_need(given, 1.0)
    assert host_need(given, 0.0) > 7 * 2 * 4096 * 1024 * 2  # what experts get moves at any ratio
    said = bill(given, memo_of(given))
    assert f"{size_words(mixed)} or {size_words(dense)} a layer, 8 layers" in said
    assert "if the router sends as many tokens to each expert" in said


def test_latent_attention_is_billed_by_its_own_sizes():
    latent = dict(
        multi_latent_attention=True,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    )
    tokens, two = 4096, 2
    of_heads = 8 * (192 + 192 + 128) - 8 * 3 * 128  # wider queries and keys
    latents = 512 + 64 + 4 * 64  # with the keys' positions; cosines and sines
    more = host_need(args(**latent), 1.0) - host_need(args(), 1.0)
    assert more == 8 * tokens * two * (of_heads + latents)


def test_a_run_that_needs_too_much_gets_the_bill_and_a_ratio_that_fits(machine):
    given = args(pipeline_model_parallel_size=2)
    budget = host_budget(given, root=machine(GIB // 2), env={})
    with pytest.raises(ValueError) as refusal:
        check_fits(given, memo_of(given), budget)
    text = str(refusal.value)
    assert text.startswith("--memo-swap-ratio 1: needs 1.")
    assert "a layer, 4 layers of pipeline stage 0, 2 micro-batches in flight" in text
    assert "there are 384 MiB" in text
    assert "MemAvailable" in text
    assert "\n" not in text
    found = re.search(r"Lower --memo-swap-ratio to (0\.\d+), ", text)
    assert found is not None
    ratio = float(found[1])
    assert host_need(given, ratio) <= budget.bytes < host_need(given, ratio + 0.01)
    check_fits(given, MemoConfig(ratio, chunks=1, resident_layers=0), budget)


def test_where_no_ratio_fits_another_way_out_is_named(machine):
    budget = host_budget(args(), root=machine(GIB // 16), env={})
    with pytest.raises(ValueError, match="Even --memo-swap-ratio 0 does not fit: raise --memo-res"):
        check_fits(args(), memo_of(args()), budget)


def test_files_count_as_room(machine):
    budget = host_budget(args(), root=machine(GIB // 2), env={})
    check_fits(args(), memo_of(args()), budget, on_disk=4 * GIB)


def test_what_the_host_cannot_hold_is_what_spills(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    given = args(memo_host_budget="64MiB", memo_nvme_path=str(tmp_path))
    memo, told = with_host_memory(given, memo_of(given))
    found = memo.host
    assert found.budget == 64 << 20
    assert found.need == host_need(given, 1.0)
    assert found.spill == found.need - found.budget + staging_bytes(found.budget)
    assert f"of it go to {tmp_path}, written and read " in told
    plenty = args(memo_host_budget="64MiB", memo_nvme_path=str(tmp_path), num_layers=0)
    memo, told = with_host_memory(plenty, memo_of(plenty))
    assert memo.host.spill == 0 and f"nothing has to go to {tmp_path}" in told


def test_a_disk_that_is_too_small_as_well_is_in_the_bill(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    given = args(memo_host_budget="64MiB", memo_nvme_path=str(tmp_path), memo_nvme_budget="128MiB")
    with pytest.raises(ValueError, match=r"there are 64 MiB \(.*\) and 120 MiB on disk\. Lower"):
        with_host_memory(given, memo_of(given))
