"""Functions of torch that call one kernel on CUDA and several operators elsewhere.

On meta tensors that show CUDA's kernels these stand in, so that a profile sees what CUDA allocates
and keeps for backward. The platform puts them in torch's place (``platform.device_mode``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel that gives the result and a boolean mask.

    Source: ``dropout`` of aten/src/ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``.
    """
    if not training or not 0 < p < 1 or inplace:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel that gives the result and the fp32 inverse root mean square of each row.

    Source: ``_fused_rms_norm`` of aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    return _FusedRmsNorm.apply(input, weight, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """Shapes only: for tensors without data."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = (*input.shape[: input.dim() - dims], *(1,) * dims)
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        grad_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(input), grad_weight, None


_dropout = F.dropout

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: dropout,
    F.rms_norm: rms_norm,
}
