"""Packed sequences: each attends to itself alone, and their bounds are checked."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_memo.ops.flash_attention import flash_attention
from megatron_memo.ops.packed import bounds_of, is_packed, positions_of

LENGTHS = (7, 1, 0, 64, 25)  # one token, none, and more than a kernel's block
BOUNDS = (0, 7, 8, 8, 72, 97)


def described(*ends, **other):
    ends = torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(
        **(dict(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends) | other)
    )


@pytest.mark.parametrize("groups", [1, 2, 4], ids=lambda n: f"{n} of 4 key heads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_bitwise_those_of_each_sequence_by_itself(groups, dtype):
    torch.manual_seed(0)
    given = [
        torch.randn(97, 1, heads, 16, dtype=dtype, requires_grad=True)
        for heads in (4, groups, groups)
    ]
    grad = torch.randn(97, 1, 64, dtype=dtype)
    out = flash_attention(*given, bounds=BOUNDS)
    grads = torch.autograd.grad(out, given, grad)
    for start, stop in ((0, 7), (7, 8), (8, 72), (72, 97)):
        own = [t[start:stop].detach().requires_grad_() for t in given]
        alone = flash_attention(*own)
        assert torch.equal(out[start:stop], alone)
        expected = torch.autograd.grad(alone, own, grad[start:stop])
        assert all(map(torch.equal, (g[start:stop] for g in grads), expected))


def test_the_log_sum_exps_of_all_sequences_are_one_tensor():
    """A thousand small ones would each be too small to leave the device."""
    q = torch.randn(97, 1, 4, 16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        flash_attention(q, q, q, bounds=BOUNDS)
    assert [t.numel() for t in saved] == [q.numel()] * 4 + [97 * 4]


def test_padding_belongs_to_the_sequence_before_it():
    ends = torch.tensor((0, 8, 16), dtype=torch.int32)
    params = described(0, 5, 16, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends)
    assert bounds_of(params, 16) == (0, 8, 16)


@pytest.mark.parametrize("ends", [(0, 5), (1, 8), (0, 6, 4, 8), (0, 9)])
def test_bounds_that_do_not_cover_the_tokens_are_refused(ends):
    with pytest.raises(ValueError, match=r"the micro-batch has 8 tokens. Give bounds"):
        bounds_of(described(*ends), 8)


def test_cross_attention_and_shared_sequences_are_refused():
    other = torch.tensor((0, 3, 8), dtype=torch.int32)
    with pytest.raises(ValueError, match="cut at different places"):
        bounds_of(described(0, 8, cu_seqlens_kv=other), 8)
    with pytest.raises(ValueError, match="Drop --hybrid-context-parallel"):
        bounds_of(described(0, 8, local_cp_size=2), 8)


def test_only_thd_is_packed():
    assert is_packed(described(0, 8))
    assert not is_packed(None)
    assert not is_packed(described(0, 8, qkv_format="sbhd"))


def test_positions_begin_again_in_every_sequence():
    places = positions_of(described(*BOUNDS), 97, torch.device("cpu"))
    assert places.tolist() == [i for length in LENGTHS for i in range(length)]
