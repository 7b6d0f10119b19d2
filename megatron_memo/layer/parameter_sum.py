"""Weight gradients of several chunks, summed in fp32.

A parameter that k chunks use gets k gradients. Left to autograd, 16-bit ones are added in 16 bits,
one rounding for each chunk; here they are added in fp32 and rounded once, to what Megatron's DDP
then adds to `main_grad`. With --gradient-accumulation-fusion upstream's linear layers add to the
fp32 `main_grad` themselves and nothing is to be done.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_memo.layer.collect import Collector

SHORT_TYPES = (torch.float16, torch.bfloat16)


class ParameterSums:
    """The 16-bit parameters of a layer, for one forward of it.

    Args:
        layer: whose modules' parameters.
        needed: False makes this do nothing.
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
                    self._entries.append((module, name, parameter, total, total.anchor(parameter)))

    @contextmanager
    def of_one_chunk(self) -> Iterator[None]:
        """While the body runs, modules see stand-ins whose gradients go to the sums.

        An instance's own dictionary comes before nn.Module's parameters when an attribute is
        looked up, so the parameters themselves stay registered, and untouched.
        """
        for module, name, parameter, total, anchor in self._entries:
            module.__dict__[name] = total.take(anchor, None, parameter.detach())
        try:
            yield
        finally:
            for module, name, *_ in self._entries:
                del module.__dict__[name]


class _Sum(Collector):
    """The fp32 sum of a parameter's gradients, rounded to its own type at the end."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, piece: None, grad: Tensor) -> None:
        if self._total is None:
            self._total = grad.float()
        else:
            self._total.add_(grad)

    def finish(self) -> Tensor | None:
        total, self._total = self._total, None
        return None if total is None else total.to(self._dtype)
