"""``device="cuda"`` in a torch call means the CPU.

Why: Megatron names the device in its calls (``torch.empty(..., device="cuda")``). A function mode
sees every torch call of this thread, so factories, ``Tensor.to`` and views of them are all covered
without a list of names. Pinned host memory needs a driver, so ``pin_memory`` is dropped too.
Can go when Megatron takes its device from one place.

A mode is off while it handles a call, and torch hands over ``Tensor.backward`` (and from some
version on ``torch.autograd.backward``) as one call. So that a backward pass sees the platform as
its forward pass did, the mode is entered again around the autograd engine.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CudaMeansCpu(TorchFunctionMode):
    """Rewrites device arguments; every other argument passes through untouched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.device:
            named = args[0] if args else kwargs and kwargs.get("type", kwargs.get("device"))
            return _CPU if _is_cuda(named) or _is_index(named) else func(*args, **(kwargs or {}))
        if kwargs:
            device = kwargs.get("device")
            if device is not None and (_is_cuda(device) or _is_index(device)):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        for arg in args:
            if isinstance(arg, (str, torch.device)) and _is_cuda(arg):
                args = tuple(
                    _CPU if isinstance(a, (str, torch.device)) and _is_cuda(a) else a for a in args
                )
                break
        return func(*args, **(kwargs or {}))


def install() -> None:
    """Enter the mode for the rest of this thread's life, and in every backward pass."""
    _keep_in_backward()
    CudaMeansCpu().__enter__()


def _keep_in_backward() -> None:
    """Wrap the Python function through which all of torch's backward calls reach the engine."""
    autograd: Any = torch.autograd
    run_engine = autograd._engine_run_backward

    @functools.wraps(run_engine)
    def run_engine_in_mode(*args: Any, **kwargs: Any) -> Any:
        with CudaMeansCpu():
            return run_engine(*args, **kwargs)

    autograd._engine_run_backward = run_engine_in_mode
