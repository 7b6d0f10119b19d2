"""Weight gradients of several chunks, summed in fp32.

A parameter that k chunks use gets k gradients. Left to autograd, 16-bit ones are added in 16 bits,
one rounding for each chunk; here they are added in fp32 and rounded once, to what Megatron's DDP
then adds to `main_grad`. With --gradient-accumulation-fusion upstream's linear layers add to the
fp32 `main_grad` themselves and nothing is to be done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SHORT_TYPES = (torch.float16, torch.bfloat16)


class ParameterSums:
    """The parameters of `modules` whose gradients need it, for one forward of one layer.

    NOTE: as for rows.Source, nothing here holds a tensor of the graph that autograd nodes hold: a
    node holds its `_Sum`, the caller holds this.
    """

    def __init__(self, layer: nn.Module, *, needed: bool):
        self._entries: list[tuple[nn.Module, str, nn.Parameter, _Sum, Tensor]] = []
        if not needed or not torch.is_grad_enabled():
            return
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if parameter.dtype in SHORT_TYPES:
                    total = _Sum(parameter.dtype)
                    anchor = _Finish.apply(total, parameter)
                    self._entries.append((module, name, parameter, total, anchor))

    @contextmanager
    def of_one_chunk(self) -> Iterator[None]:
        """While the body runs, modules see stand-ins whose gradients go to the sums.

        An instance's own dictionary comes before nn.Module's parameters when an attribute is
        looked up, so the parameters themselves stay registered, and untouched.
        """
        for module, name, parameter, total, anchor in self._entries:
            module.__dict__[name] = _Use.apply(total, anchor, parameter.detach())
        try:
            yield
        finally:
            for module, name, *_ in self._entries:
                del module.__dict__[name]


class _Sum:
    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        if self._total is None:
            self._total = grad.float()
        else:
            self._total.add_(grad)

    def finish(self) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)


class _Finish(torch.autograd.Function):
    """Stands for the parameter in the graph; its backward runs when every use has added."""

    @staticmethod
    def forward(ctx: Any, total: _Sum, parameter: Tensor) -> Tensor:
        ctx.total = total
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return None, ctx.total.finish()


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: _Sum, anchor: Tensor, values: Tensor) -> Tensor:
        ctx.total = total
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.total.add(grad)
        return None, grad.new_zeros(()), None
