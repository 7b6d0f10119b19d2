"""Flash attention against the softmax written out, forward and backward."""

import math

import pytest
import torch

from megatron_memo.ops.flash_attention import flash_attention, forward_flops


def written_out(query, key, value, scale, causal):
    """[s, b, n, d] in float64, s x s scores."""
    group = query.size(2) // key.size(2)
    q, k, v = (t.double() for t in (query, key, value))
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    out = torch.einsum("bnqk,kbnd->qbnd", scores.softmax(-1), v)
    return out.reshape(out.size(0), out.size(1), -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4], ids=lambda n: f"{n} of 4 key heads")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_the_softmax(causal, groups, batch, dtype):
    torch.manual_seed(0)
    s, n, d = 67, 4, 16
    given = [
        torch.randn(s, batch, heads, d, dtype=dtype, requires_grad=True)
        for heads in (n, groups, groups)
    ]
    grad = torch.randn(s, batch, n * d, dtype=dtype)
    out = flash_attention(*given, softmax_scale=0.2, causal=causal)
    assert out.shape == (s, batch, n * d)
    assert out.is_contiguous()
    grads = torch.autograd.grad(out, given, grad)
    expected = written_out(*given, 0.2, causal)
    expected_grads = torch.autograd.grad(expected, given, grad.double())
    # Scores and sums over s tokens in the kernel's precision; results rounded once.
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_narrower_than_keys_are_saved_as_they_came(dtype):
    torch.manual_seed(0)
    s, n = 67, 4
    given = [torch.randn(s, 2, n, d, dtype=dtype, requires_grad=True) for d in (24, 24, 16)]
    grad = torch.randn(s, 2, n * 16, dtype=dtype)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = flash_attention(*given, softmax_scale=0.2)
    assert out.shape == (s, 2, n * 16)
    assert [t.numel() for t in saved[:4]] == [t.numel() for t in (*given, out)]
    grads = torch.autograd.grad(out, given, grad)
    expected = written_out(*given, 0.2, True)
    expected_grads = torch.autograd.grad(expected, given, grad.double())
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < tolerance


def test_values_wider_than_keys_are_refused_by_flag():
    with pytest.raises(ValueError, match=r"--v-head-dim 24: is more than the 16 of a key"):
        flash_attention(*(torch.randn(8, 1, 2, d) for d in (16, 16, 24)))


def test_the_scale_defaults_to_one_over_root_d():
    q, k, v = (torch.randn(8, 1, 2, 16) for _ in range(3))
    assert torch.equal(
        flash_attention(q, k, v), flash_attention(q, k, v, softmax_scale=1 / math.sqrt(16))
    )


def test_what_it_saves_is_the_output_it_returns_and_grouped_keys():
    """The layer offloads the output once because both are one storage; k and v are not expanded."""
    q = torch.randn(32, 1, 4, 16, requires_grad=True)
    k, v = (torch.randn(32, 1, 2, 16, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = flash_attention(q, k, v)
    addresses = {t.untyped_storage().data_ptr() for t in saved}
    assert {t.untyped_storage().data_ptr() for t in (q, k, v, out)} < addresses
    lse_bytes = 32 * 4 * 4
    whole = sum(t.untyped_storage().nbytes() for t in (q, k, v, out)) + lse_bytes
    assert sum(t.untyped_storage().nbytes() for t in saved) == whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for CUDA have dropout")
def test_dropout_without_a_kernel_for_it_is_refused_by_flag():
    q = torch.randn(8, 1, 2, 16)
    with pytest.raises(ValueError, match=r"--attention-dropout 0.1: .* Give"):
        flash_attention(q, q, q, dropout_p=0.1)


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        flash_attention(*(torch.randn(8, 1, n, 16) for n in (3, 2, 2)))


def test_flops_are_halved_by_the_causal_mask():
    full = forward_flops(1024, 2, 8, 64, causal=False)
    assert full == 2 * 2 * (2 * 8) * 1024 * 1024 * 64
    assert forward_flops(1024, 2, 8, 64, causal=True) * 2 == full
