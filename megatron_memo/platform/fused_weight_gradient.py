"""The extension that adds a weight's gradient to ``main_grad`` in the matrix product's own kernel.

Why: ``--gradient-accumulation-fusion``, Megatron's default, needs a CUDA extension that apex
compiles, and a profile of a run that has it must see that no gradient is made in between. For
tensors without data only. Can go when upstream does the same without an extension.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

_NAME = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Stand in for the extension, unless it is here."""
    if importlib.util.find_spec(_NAME) is None:
        module: Any = ModuleType(_NAME)
        module.wgrad_gemm_accum_fp32 = add_product
        module.wgrad_gemm_accum_fp16 = add_product
        sys.modules[_NAME] = module


def add_product(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += grad_output^T inputs``, without values: nothing is allocated."""
