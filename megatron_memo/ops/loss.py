"""Token losses of a classifier in chunks of tokens: never the logits of the whole sequence.

Forward keeps the hidden states, which stock's output projection keeps too, and no logits. Backward
computes a chunk's logits again, where the gradient of each of its tokens is known, and takes the
chunk's gradients from them. Cost: one more product with the weight (stock does three: one forward,
two backward), and under sequence parallelism one more gather.

NOTE: gradients taken in forward would save that product, but only for a weight gradient whose
tokens' weights are known then; loss masks, token counts and loss scales come later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_memo.layer.parameter_sum import SHORT_TYPES
from megatron_memo.layer.replay import Replay
from megatron_memo.layer.rows import Rows

# (hidden [n, b, h], weight [v, h], labels [b, ranks * n]) -> losses [b, ranks * n], all of a chunk;
# n is a rank's share of the chunk and v its share of the vocabulary.
TokenLosses = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunked_loss(
    token_losses: TokenLosses,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: Sequence[Rows],
) -> Tensor:
    """`token_losses` of the whole sequence, chunk by chunk.

    Args:
        token_losses: pure: it runs again in backward. It gathers hidden states from the ranks of a
            sequence-parallel group itself, as Megatron's column-parallel layer does.
        hidden: [n, b, h], this rank's tokens.
        weight: [v, h]; its gradient arrives once, summed over chunks in fp32 if it is 16-bit, or
            has gone to `main_grad` by itself with gradient-accumulation fusion.
        labels: [b, s] of the whole sequence, s = ranks * n.
        chunks: rows that cover 0 to n, in order.

    Returns:
        [b, s], in the type of the losses. Any gradient of it gives the right gradients.
    """
    assert chunks[0].start == 0 and chunks[-1].stop == hidden.shape[0], "chunks leave tokens out"
    return _ChunkedLoss.apply(token_losses, tuple(chunks), labels, hidden, weight)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token_losses: TokenLosses,
        chunks: tuple[Rows, ...],
        labels: Tensor,
        hidden: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.token_losses, ctx.chunks = token_losses, chunks
        ctx.replay = Replay(hidden.device.type)
        ctx.save_for_backward(labels, hidden, weight)
        by_token = labels.transpose(0, 1).contiguous()
        losses: Tensor | None = None
        for rows in chunks:
            part = token_losses(
                hidden[rows.start : rows.stop], weight, _of(rows, by_token)
            ).transpose(0, 1)
            if losses is None:
                losses = part.new_empty(by_token.shape)
            view = rows.view(losses)
            view.copy_(part.reshape(view.shape))
        assert losses is not None
        return losses.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        labels, hidden, weight = ctx.saved_tensors
        by_token = labels.transpose(0, 1).contiguous()
        grad = grad.transpose(0, 1).contiguous()
        _, _, _, wants_hidden, wants_weight = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        stand_in = _StandIn(weight, wants_weight)
        for rows in ctx.chunks:
            part = hidden[rows.start : rows.stop].detach().requires_grad_(wants_hidden)
            with ctx.replay.restored():
                losses = ctx.token_losses(part, stand_in.weight, _of(rows, by_token))
            wanted = [t for t in (part, stand_in.weight) if t.requires_grad]
            # A fused weight gradient is in main_grad, and none comes out here.
            found = torch.autograd.grad(losses, wanted, _of(rows, grad), allow_unused=True)
            if hidden_grad is not None:
                hidden_grad[rows.start : rows.stop] = found[0]
            if wants_weight:
                stand_in.add(found[-1])
            del losses, found  # or they would last until the next chunk has its own
        return None, None, None, hidden_grad, stand_in.finish() if wants_weight else None


def _of(rows: Rows, by_token: Tensor) -> Tensor:
    """A chunk's [b, ranks * n] of a [s, b]."""
    return rows.take(by_token).transpose(0, 1)


class _StandIn:
    """What the chunks use for the weight: a leaf of its own, so that the weight's hooks stay quiet.

    Megatron's linear layers look for `main_grad` and its kin among a weight's attributes, and say
    there that they have added to it.
    """

    def __init__(self, weight: Tensor, wanted: bool):
        self._real = weight
        self.weight = weight.detach().requires_grad_(wanted)
        self.weight.__dict__.update(weight.__dict__)
        self._total: Tensor | None = None

    def add(self, grad: Tensor | None) -> None:
        """A chunk's gradient; one that stands for what is in `main_grad` is kept, not added."""
        if grad is None or getattr(self.weight, "grad_added_to_main_grad", False):
            self._total = grad
        elif self._total is None:
            self._total = grad.float() if grad.dtype in SHORT_TYPES else grad
        else:
            self._total.add_(grad)

    def finish(self) -> Tensor | None:
        """The whole gradient, in the weight's type."""
        if getattr(self.weight, "grad_added_to_main_grad", False):
            self._real.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None if self._total is None else self._total.to(self._real.dtype)
