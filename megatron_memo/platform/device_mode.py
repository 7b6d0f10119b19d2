"""``device="cuda"`` in a torch call means the device that stands in.

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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_memo.platform import stand_in


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Functions that others stand in for; empty but in a profile. See `ops.as_on_cuda`.
_instead: dict[Any, Callable[..., Any]] = {}


class CudaMeansStandIn(TorchFunctionMode):
    """Rewrites device arguments; every other argument passes through untouched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.device:
            named = args[0] if args else kwargs and kwargs.get("type", kwargs.get("device"))
            return (
                stand_in.device()
                if _is_cuda(named) or _is_index(named)
                else func(*args, **(kwargs or {}))
            )
        if kwargs:
            device = kwargs.get("device")
            if device is not None and (_is_cuda(device) or _is_index(device)):
                kwargs = {**kwargs, "device": stand_in.device()}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        for arg in args:
            if isinstance(arg, (str, torch.device)) and _is_cuda(arg):
                here = stand_in.device()
                args = tuple(
                    here if isinstance(a, (str, torch.device)) and _is_cuda(a) else a for a in args
                )
                break
        other = _instead.get(func)
        if other is not None:
            return other(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def install(instead: Mapping[Any, Callable[..., Any]] | None = None) -> None:
    """Enter the mode for the rest of this thread's life, and in every backward pass.

    Args:
        instead: functions of torch, and what is called in their place.
    """
    _instead.update(instead or {})
    _keep_in_backward()
    CudaMeansStandIn().__enter__()


def _keep_in_backward() -> None:
    """Wrap the Python function through which all of torch's backward calls reach the engine."""
    autograd: Any = torch.autograd
    run_engine = autograd._engine_run_backward

    @functools.wraps(run_engine)
    def run_engine_in_mode(*args: Any, **kwargs: Any) -> Any:
        with CudaMeansStandIn():
            return run_engine(*args, **kwargs)

    autograd._engine_run_backward = run_engine_in_mode
