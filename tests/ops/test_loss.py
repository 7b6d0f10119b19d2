"""Token losses in chunks, over plain torch: any token gradient, one weight gradient, little memory.

With Megatron's layers and several ranks: test_loss_head.
"""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_memo.layer.rows import Rows
from megatron_memo.ops.loss import chunked_loss
from megatron_memo.profile.storage import StorageMeter
from megatron_memo.training.loss_head import LossHead, cut, head_of, loss_head

TOKENS, BATCH, HIDDEN, VOCABULARY = 53, 2, 16, 40


def token_losses(hidden, weight, labels):
    """What Megatron's pair of output layer and cross entropy does on one rank."""
    logits = torch.matmul(hidden, weight.t()).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    return losses.view(hidden.shape[:2]).transpose(0, 1)


def given(dtype=torch.float32, tokens=TOKENS, vocabulary=VOCABULARY):
    torch.manual_seed(3)
    hidden = torch.randn(tokens, BATCH, HIDDEN).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocabulary, HIDDEN).to(dtype))
    labels = torch.randint(vocabulary, (BATCH, tokens))
    grad = torch.randn(BATCH, tokens) * (torch.rand(BATCH, tokens) < 0.7)  # masked, weighted
    return hidden, weight, labels, grad


def run(function, hidden, weight, labels, grad):
    hidden.grad = weight.grad = None
    losses = function(hidden, weight, labels)
    losses.backward(grad)
    return losses.detach(), hidden.grad, weight.grad


def chunked(count):
    return lambda hidden, weight, labels: chunked_loss(
        token_losses, hidden, weight, labels, cut(count, 1, hidden.shape[0])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 7, 13])
def test_losses_and_gradients_are_those_of_the_whole(count, dtype):
    inputs = given(dtype)
    losses, hidden_grad, weight_grad = run(token_losses, *inputs)
    ours = run(chunked(count), *inputs)
    assert torch.equal(ours[0], losses) and ours[0].is_contiguous()
    assert torch.equal(ours[1], hidden_grad)
    if count == 1:
        assert torch.equal(ours[2], weight_grad)
    # Each chunk's sum is rounded once, and the sum of them once.
    unit = 2.0**-24 if dtype is torch.float32 else 2.0**-8
    bound = (math.sqrt(count) + 2) * unit * (TOKENS * BATCH if dtype is torch.float32 else 1)
    error = (ours[2] - weight_grad).float().norm() / weight_grad.float().norm()
    assert error <= bound
    assert ours[2].dtype is dtype


def test_short_gradients_are_summed_in_fp32():
    """Chunks that cancel leave what bf16 sums would have lost."""
    hidden = torch.ones(4, 1, 1, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    grad = torch.tensor([[256.0, 1.0, 1.0, -256.0]])

    def linear(hidden, weight, _labels):
        return torch.matmul(hidden, weight.t())[..., 0].float().transpose(0, 1)

    labels = torch.zeros(1, 4, dtype=torch.long)
    chunked_loss(linear, hidden, weight, labels, cut(4, 1, 4)).backward(grad)
    assert weight.grad.item() == 2.0  # in bf16 256 + 1 + 1 - 256 is 0


def test_a_token_that_does_not_count_changes_no_gradient():
    hidden, weight, labels, grad = given()
    _, hidden_grad, weight_grad = run(chunked(4), hidden, weight, labels, grad)
    dropped = grad == 0
    assert dropped.any() and not hidden_grad.transpose(0, 1)[dropped].any()
    labels[dropped] = 0
    assert torch.equal(run(chunked(4), hidden, weight, labels, grad)[2], weight_grad)


def test_hooks_of_the_weight_run_once_a_pass():
    """Megatron's data parallelism counts them."""
    hidden, weight, labels, grad = given()
    calls = []
    weight.register_post_accumulate_grad_hook(lambda w: calls.append(w.grad.clone()))
    weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    run(chunked(5), hidden, weight, labels, grad)
    assert len(calls) == 2 and all(torch.equal(seen, weight.grad) for seen in calls)


def test_a_weight_used_elsewhere_too_gets_both_gradients():
    hidden, weight, labels, grad = given()

    def tied(losses):
        return lambda h, w, t: losses(h + F.embedding(t.t(), w), w, t)

    expected = run(tied(token_losses), hidden, weight, labels, grad)
    ours = run(tied(chunked(1)), hidden, weight, labels, grad)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


def test_frozen_inputs_get_no_gradient():
    hidden, weight, labels, grad = given()
    expected = run(token_losses, hidden, weight, labels, grad)
    weight.requires_grad_(False)
    assert torch.equal(run(chunked(3), hidden, weight, labels, grad)[1], expected[1])
    assert weight.grad is None
    weight.requires_grad_()
    frozen = hidden.detach()
    chunked(3)(frozen, weight, labels).backward(grad)
    assert frozen.grad is None
    assert torch.allclose(weight.grad, expected[2], rtol=1e-4, atol=1e-5)


def test_without_gradients_nothing_is_kept():
    hidden, weight, labels, _ = given()
    with torch.no_grad():
        losses = chunked(3)(hidden, weight, labels)
    assert not losses.requires_grad
    assert torch.equal(losses, token_losses(hidden, weight, labels))


def test_backward_computes_under_the_autocast_of_forward():
    seen = []

    def spy(hidden, weight, labels):
        logits = torch.matmul(hidden, weight.t())
        seen.append(logits.dtype)
        return token_losses(hidden, weight, labels)

    hidden, weight, labels, grad = given()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = chunked_loss(spy, hidden, weight, labels, cut(2, 1, TOKENS))
    losses.backward(grad)
    assert seen == [torch.bfloat16] * 4


def test_a_weight_changed_before_backward_is_an_error():
    hidden, weight, labels, grad = given()
    losses = chunked(2)(hidden, weight, labels)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(grad)


def test_the_peak_falls_with_the_number_of_chunks():
    inputs = given(tokens=512, vocabulary=4096)
    hidden, weight, labels, grad = inputs

    def peak(count):
        hidden.grad = weight.grad = None
        with StorageMeter(ignore=list(inputs)) as meter:
            chunked(count)(hidden, weight, labels).backward(grad)
        return meter.peak_bytes

    # What no chunk makes smaller: gradients (a chunk's beside the sum), losses, labels by token.
    fixed = 2 * weight.nbytes + hidden.nbytes + 2 * grad.nbytes + 2 * labels.nbytes
    whole = peak(1) - fixed
    assert whole > 10 * fixed
    for count in (2, 4, 16):
        assert (peak(count) - fixed) * count == pytest.approx(whole, rel=0.1)


# ---- the policy


@pytest.mark.parametrize(("chunks", "local"), [(1, 5), (3, 7), (5, 5), (4, 97)])
def test_cuts_cover_the_tokens_evenly(chunks, local):
    rows = cut(chunks, 2, local)
    assert len(rows) == chunks and rows[0].start == 0 and rows[-1].stop == local
    assert all(a.stop == b.start for a, b in pairwise(rows))
    lengths = {r.stop - r.start for r in rows}
    assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1
    assert {(r.ranks, r.n) for r in rows} == {(2, local)}


def test_chunks_that_leave_tokens_out_are_refused():
    hidden, weight, labels, _ = given()
    with pytest.raises(AssertionError, match="leave tokens out"):
        chunked_loss(token_losses, hidden, weight, labels, [Rows(1, TOKENS, 0, TOKENS - 1)])


SIZES = dict(tokens=1 << 20, local_tokens=1 << 17, vocabulary=16032, itemsize=2)  # 94 GiB of logits


def test_auto_is_stock_while_logits_are_small_and_cuts_them_when_they_are_not():
    gib = 1 << 30
    assert loss_head(None, **SIZES, device_bytes=None) is None
    for flag in (None, "auto"):
        head = loss_head(flag, **SIZES, device_bytes=80 * gib)
        assert 94 * gib / head.chunks <= 80 * gib / 64
        assert 94 * gib / (head.chunks - 2) > 80 * gib / 64
        small = SIZES | dict(tokens=1 << 16)
        assert loss_head(flag, **small, device_bytes=80 * gib) is None
    few = SIZES | dict(local_tokens=3)
    assert loss_head("auto", **few, device_bytes=80 * gib) == LossHead(3)


def test_a_number_is_taken_whatever_the_memory():
    assert loss_head("16", **SIZES, device_bytes=None) == LossHead(16)
    assert loss_head("1", **SIZES, device_bytes=1) == LossHead(1)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("many", "must be auto or a whole number"),
        ("1.5", "must be auto or a whole number"),
        ("0", "must be at least 1"),
        ("-4", "must be at least 1"),
        ("131073", "more than the 131072 tokens .* Give at most 131072"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flag, says):
    with pytest.raises(ValueError, match=f"^--memo-loss-chunks {flag}: .*{says}"):
        loss_head(flag, **SIZES, device_bytes=None)


def arguments(**other):
    """Of 1M tokens at tp 8 with sequence parallelism, as Megatron has them."""
    defaults = dict(
        memo_swap_ratio="0.5",
        memo_loss_chunks=None,
        tensor_model_parallel_size=8,
        context_parallel_size=1,
        sequence_parallel=True,
        micro_batch_size=1,
        seq_length=1 << 20,
        padded_vocab_size=8 * 16032,
        params_dtype=torch.bfloat16,
    )
    return SimpleNamespace(**(defaults | other))


def test_the_head_of_a_command_line():
    memory = 80 << 30
    assert head_of(arguments(), memory) == loss_head(None, **SIZES, device_bytes=memory)
    assert head_of(arguments(), None) is None
    assert head_of(arguments(memo_swap_ratio=None), memory) is None
    twice = SIZES | dict(tokens=2 << 20)
    assert head_of(arguments(micro_batch_size=2), memory) == loss_head(
        None, **twice, device_bytes=memory
    )
    assert head_of(arguments(memo_loss_chunks="16"), None) == LossHead(16)
    with pytest.raises(ValueError, match="more than the 131072 tokens"):
        head_of(arguments(memo_loss_chunks="131073"), None)
    whole = arguments(memo_loss_chunks="131073", sequence_parallel=False)
    assert head_of(whole, None) == LossHead(131073)


def test_the_head_counts_a_ranks_own_tokens():
    memory = 80 << 30
    shared = SIZES | dict(tokens=1 << 18, local_tokens=1 << 15)
    expected = loss_head(None, **shared, device_bytes=memory)
    assert head_of(arguments(context_parallel_size=4), memory) == expected
    packed = arguments(sft=True, micro_batch_size=2, memo_loss_chunks=str(1 << 18))
    assert head_of(packed, None) == LossHead(1 << 18)  # two samples in one row, over tp 8
    with pytest.raises(ValueError, match="more than the 32768 tokens"):
        head_of(arguments(context_parallel_size=4, memo_loss_chunks="32769"), None)


@pytest.mark.parametrize(
    "name", ["logits_save_dir", "logits_load_dir", "defer_embedding_wgrad_compute"]
)
def test_what_needs_whole_logits_gets_stocks_head_or_a_sentence(name):
    assert head_of(arguments(**{name: "x"}), 80 << 30) is None
    with pytest.raises(ValueError, match=f"--memo-loss-chunks 4: --{name.replace('_', '-')} "):
        head_of(arguments(**{name: "x"}, memo_loss_chunks="4"), 80 << 30)
