"""Weight gradients of a layer's chunks, on their way to Megatron's DDP.

A parameter that k chunks use gets k gradients. Left to autograd, 16-bit ones are added in 16 bits,
one rounding for each chunk; here they are added in fp32 and rounded once.

With --gradient-accumulation-fusion upstream's linear layers add a weight's gradient to the fp32
`main_grad` themselves, and tell DDP so by an attribute of the weight. They find the weight among
what autograd saved, where under saved-tensor hooks it is another tensor without attributes. So they
work on a stand-in here too, and what they would have told DDP is told when the last chunk is done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_memo.layer.collect import Collector

SHORT_TYPES = (torch.float16, torch.bfloat16)


class ParameterSums:
    """The parameters of a layer whose gradients need this, for one forward of it.

    Args:
        layer: whose modules' parameters.
        chunks: how often each is used.
        fusion: upstream adds gradients of weights to `main_grad` by itself.
        used_once: a part of the layer that all chunks together use once; nothing is to be summed.
    """

    def __init__(
        self, layer: nn.Module, *, chunks: int, fusion: bool, used_once: nn.Module | None = None
    ):
        self._entries: list[tuple[nn.Module, str, nn.Parameter, _Sum, Tensor]] = []
        if not torch.is_grad_enabled():
            return
        once = frozenset() if used_once is None else frozenset(used_once.modules())
        for module in layer.modules():
            several = chunks > 1 and module not in once
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                fused = fusion and parameter.dim() > 1 and hasattr(parameter, "main_grad")
                if fused or (several and parameter.dtype in SHORT_TYPES):
                    total = _Sum(parameter)
                    self._entries.append((module, name, parameter, total, total.anchor(parameter)))

    @contextmanager
    def of_one_chunk(self) -> Iterator[None]:
        """While the body runs, modules see stand-ins whose gradients go to the sums.

        An instance's own dictionary comes before nn.Module's parameters when an attribute is
        looked up, so the parameters themselves stay registered, and untouched.
        """
        for module, name, parameter, total, anchor in self._entries:
            stand_in = total.take(anchor, None, parameter.detach())
            if hasattr(parameter, "main_grad"):
                stand_in.main_grad = parameter.main_grad  # type: ignore[attr-defined]
            module.__dict__[name] = stand_in
        try:
            yield
        finally:
            for module, name, *_ in self._entries:
                del module.__dict__[name]


class _Sum(Collector):
    """The fp32 sum of a parameter's gradients, rounded to its own type at the end.

    NOTE: it holds the parameter, which is a leaf and so no part of a cycle (see `collect`).
    """

    fills_in = False

    def __init__(self, parameter: nn.Parameter):
        self._parameter: Any = parameter
        self._total: Tensor | None = None

    def add(self, piece: None, grad: Tensor | None) -> None:
        if grad is None:
            return  # it is in main_grad
        if self._total is None:
            self._total = grad.float()
        else:
            self._total.add_(grad)

    def finish(self) -> Tensor | None:
        total, self._total = self._total, None
        if total is not None:
            return total.to(self._parameter.dtype)
        if not hasattr(self._parameter, "grad_added_to_main_grad"):
            return None  # no DDP that would ask for a gradient
        # As upstream does: a gradient without meaning, so that DDP's hook runs, and the word that
        # it is not to be added.
        self._parameter.grad_added_to_main_grad = True
        zeros = getattr(self._parameter, "zero_out_wgrad", False)
        make = torch.zeros_like if zeros else torch.empty_like
        return make(self._parameter)
