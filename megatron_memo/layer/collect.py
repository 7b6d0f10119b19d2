"""A tensor used piecewise: its gradients are collected by us, and handed to autograd once.

NOTE: a Collector is held by autograd nodes, so it must not hold a tensor of their graph itself (the
anchor belongs to the caller): that would be a cycle which reference counting never frees.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Collector(ABC):
    """Gradients of pieces, on their way to one gradient.

    Attributes:
        fills_in: a piece whose consumers return no gradient gets zeros; else `add` gets None.
    """

    fills_in = True

    @abstractmethod
    def add(self, piece: Any, grad: Any) -> None:
        """A piece's gradient has arrived."""

    @abstractmethod
    def finish(self) -> Tensor | None:
        """Every piece's has; the whole gradient."""

    def anchor(self, whole: Tensor) -> Tensor:
        """A scalar that stands for the whole in the graph."""
        return _Anchor.apply(self, whole)

    def take(self, anchor: Tensor, piece: Any, values: Tensor) -> Tensor:
        """`values` (detached), whose gradient goes to `add` under the name `piece`."""
        return _Take.apply(self, piece, anchor, values)


class _Anchor(torch.autograd.Function):
    """Backward runs once, after that of every piece taken from it."""

    @staticmethod
    def forward(ctx: Any, collector: Collector, whole: Tensor) -> Tensor:
        ctx.collector = collector
        return whole.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return None, ctx.collector.finish()


class _Take(torch.autograd.Function):
    """A piece. All its consumers' gradients meet in this node's input, in autograd's own order."""

    @staticmethod
    def forward(
        ctx: Any, collector: Collector, piece: Any, anchor: Tensor, values: Tensor
    ) -> Tensor:
        ctx.collector, ctx.piece = collector, piece
        ctx.anchor_like = anchor.dtype, anchor.device
        ctx.set_materialize_grads(collector.fills_in)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        ctx.collector.add(ctx.piece, grad)
        # The anchor's own gradient is never read, but autograd has to see one to run it.
        dtype, device = ctx.anchor_like
        return None, None, torch.zeros((), dtype=dtype, device=device), None
