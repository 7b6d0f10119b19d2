"""Workspaces inside of CUDA's kernels: which operators have one, and how much."""

import pytest
import torch

from megatron_memo.ops.target import kernels_for, show_kernels_of
from megatron_memo.ops.workspace import cublas, embedding_backward, flash_backward, of_cuda_kernel

GIB = 2**30
aten = torch.ops.aten


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_flash_backward_takes_two_units_in_fp32():
    # 7B at 1M tokens, tp 8: a unit is 4 heads of 128 in bf16, 1 GiB.
    rows, accumulator = flash_backward(1, 4, 1 << 20, 128)
    assert accumulator.size == 2 * GIB and rows.size == 4 * (1 << 20) * 4


def test_flash_backward_rounds_tokens_and_widths_up():
    rows, accumulator = flash_backward(2, 3, 130, 40)
    assert rows.size == 2 * 3 * 256 * 4
    assert accumulator.size == 2 * 3 * 256 * 64 * 4
    assert flash_backward(1, 1, 128, 200)[1].size == 128 * 256 * 4


def test_flash_backward_is_found_by_its_operator():
    q = on_meta(1, 4, 256, 64)
    args = (q, q, q, q, q, on_meta(1, 4, 256, dtype=torch.float32), None, None, 256, 256, 0.0, True)
    found = of_cuda_kernel(aten._scaled_dot_product_flash_attention_backward.default, args)
    assert [w.size for w in found] == [w.size for w in flash_backward(1, 4, 256, 64)]


def test_embedding_backward_sorts_only_many_indices():
    assert embedding_backward(3072, 50000, 64) == []
    sizes = {w.what: w.size for w in embedding_backward(10_000, 100, 64)}
    assert sizes["embedding backward's sorted indices"] == 2 * 10_000 * 8
    assert sizes["embedding backward's partial sums"] == (1000 + 100) * 64 * 4


def test_embedding_backward_never_has_more_partial_sums_than_indices():
    partial = embedding_backward(4000, 1 << 20, 8)[-1]
    assert partial.size == 4000 * 8 * 4


def test_a_mask_as_index_costs_the_positions_that_it_may_hold():
    mask = torch.empty(8, 16, dtype=torch.bool, device="meta")
    (found,) = of_cuda_kernel(aten.index_put_.default, (on_meta(8, 16), [mask], on_meta()))
    assert found.size == 8 * 16 * 2 * 8
    whole = torch.empty(8, dtype=torch.int64, device="meta")
    assert of_cuda_kernel(aten.index.Tensor, (on_meta(8, 16), [None, whole])) == []


def test_a_gathered_list_is_one_piece_first():
    outputs = [on_meta(4, 8) for _ in range(3)]
    (found,) = of_cuda_kernel(torch.ops.c10d.allgather_.default, ([outputs], [on_meta(4, 8)]))
    assert found.size == 3 * 4 * 8 * 2


def test_other_operators_have_none():
    assert of_cuda_kernel(aten.add.Tensor, (on_meta(4), on_meta(4))) == []


def test_cublas_takes_more_from_hopper_on():
    assert cublas(9) == 32 << 20 and cublas(8) == (8 << 20) + (128 << 10)


def test_tensors_without_data_show_the_kernels_asked_for():
    try:
        show_kernels_of("cpu")
        assert kernels_for(on_meta(1)) == "cpu"
        show_kernels_of("cuda")
        assert kernels_for(on_meta(1)) == "cuda" and kernels_for(torch.ones(1)) == "cpu"
        with pytest.raises(AssertionError):
            show_kernels_of("tpu")
    finally:
        show_kernels_of("cuda")
