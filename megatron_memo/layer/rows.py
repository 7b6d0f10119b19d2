"""Autograd Functions that cut a sequence into rows and join it again, in one buffer each way.

Slicing with autograd's own ops makes a full-size zero gradient for every slice, and `torch.cat`
holds parts and whole at once. Here a chunk's gradient is written into its rows of one buffer.

"Rows" are those of a rank's own tokens. A tensor over the whole sequence (q, k, v, the attention
output under sequence parallelism) holds the ranks' tokens one rank after the other, so that rows
[r0, r1) of every rank are `whole.view(ranks, n, ...)[:, r0:r1]`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_memo.layer.collect import Collector


def _nothing() -> None:
    """Nobody wants to know."""


class Rows:
    """Rows [start, stop) of each of `ranks` stretches of `n` tokens."""

    __slots__ = ("n", "ranks", "start", "stop")

    def __init__(self, ranks: int, n: int, start: int, stop: int):
        self.ranks, self.n, self.start, self.stop = ranks, n, start, stop

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Tells these rows from others, as a key."""
        return self.ranks, self.n, self.start, self.stop

    @property
    def all(self) -> bool:
        return self.start == 0 and self.stop == self.n

    def view(self, whole: Tensor) -> Tensor:
        """[ranks*n, ...] -> [ranks, stop-start, ...], a view (`whole` is contiguous)."""
        return whole.view(self.ranks, self.n, *whole.shape[1:])[:, self.start : self.stop]

    def take(self, whole: Tensor) -> Tensor:
        """[ranks*n, ...] -> [ranks*(stop-start), ...], a view where that is possible."""
        if self.all:
            return whole
        return self.view(whole).reshape(-1, *whole.shape[1:])


class Source(Collector):
    """A tensor that is taken apart: collects the gradients of its rows in one buffer.

    A chunk's rows are taken once and used by all its consumers, so that their gradients are added
    in the order in which stock Megatron adds them: bitwise the same sum.
    """

    def __init__(self, whole: Tensor, on_complete: Callable[[], None] | None = None):
        self._shape, self._dtype, self._device = whole.shape, whole.dtype, whole.device
        self._grad: Tensor | None = None
        self._on_complete = on_complete

    def add(self, piece: Rows, grad: Tensor) -> None:
        if piece.all:
            self._grad = grad.reshape(self._shape)
            return
        if self._grad is None:
            self._grad = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        part = piece.view(self._grad)
        part.copy_(grad.reshape(part.shape))

    def finish(self) -> Tensor | None:
        grad, self._grad = self._grad, None
        if self._on_complete is not None:
            self._on_complete()
        return grad


class Target:
    """A tensor that is put together from rows; hands each part its rows of the gradient.

    NOTE: as for a Collector, the tokens that `put` returns belong to the caller.
    """

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.grad: Tensor | None = None
        self.parts_left = 0

    def put(self, rows: Rows, part: Tensor, on_gradient: Callable[[], None] = _nothing) -> Tensor:
        """Writes a part into its rows; its token. A part that is the whole is used as it is.

        `on_gradient()` is called in backward, before the part's gradient goes further.
        """
        values = part.detach()
        if rows.all:
            self.whole = values if values.is_contiguous() else values.contiguous()
        else:
            if self.whole is None:
                self.whole = values.new_empty((rows.ranks * rows.n, *values.shape[1:]))
            view = rows.view(self.whole)
            view.copy_(values.reshape(view.shape))
        return _Put.apply(self, rows, part, on_gradient)

    def join(self, tokens: list[Tensor]) -> Tensor:
        """The whole, tied to the parts whose tokens are given."""
        whole, self.whole, self.parts_left = self.whole, None, len(tokens)
        assert whole is not None
        return _Join.apply(self, whole, *tokens)


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, target: Target, rows: Rows, part: Tensor, on_gradient: Callable[[], None]
    ) -> Tensor:
        ctx.target, ctx.rows, ctx.shape, ctx.on_gradient = target, rows, part.shape, on_gradient
        return part.new_empty(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        ctx.on_gradient()
        target = ctx.target
        grad = ctx.rows.take(target.grad).view(ctx.shape)
        target.parts_left -= 1
        if target.parts_left == 0:
            target.grad = None
        return None, None, grad, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Target, whole: Tensor, *tokens: Tensor) -> Tensor:
        ctx.target, ctx.parts = target, len(tokens)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.target.grad = grad.contiguous()
        return (None, None) + (grad.new_zeros(()),) * ctx.parts


class _OnBackward(torch.autograd.Function):
    """Identity whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, call: Any, values: Tensor) -> Tensor:
        ctx.call = call
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return None, grad


def on_backward(values: Tensor, call: Any) -> Tensor:
    """`values`; `call()` runs when their gradient arrives, before it goes further."""
    return _OnBackward.apply(call, values)
