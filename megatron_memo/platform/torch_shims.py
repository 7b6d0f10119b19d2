"""Torch outside ``torch.cuda``: what Megatron calls that has no meaning without a device."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_memo.platform.askers import asked_by_megatron


def install(compile_with: Callable[..., Any] | None = None) -> None:
    """Install every shim of this file.

    Args:
        compile_with: stands for ``torch.compile``; None leaves functions as they are.
    """
    _tensor_methods()
    _tensor_type()
    _no_compile(compile_with)
    _gloo_for_nccl()
    _loader_has_own_generator()
    _quiet()


def _tensor_methods() -> None:
    """Tensors and modules are on "the device" already, and pinned as well as they can be.

    Can go when Megatron moves tensors with ``.to(device)`` only.
    """
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _tensor_type() -> None:
    """Megatron's optimizers compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``.

    Can go when they compare dtypes.
    """
    real_type = torch.Tensor.type

    @functools.wraps(real_type)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = real_type(self)
            if not asked_by_megatron():
                return name
            return name.replace("torch.meta.", "torch.", 1).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return real_type(self, dtype, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.type = tensor_type


def _no_compile(compile_with: Callable[..., Any] | None) -> None:
    """Fused pointwise kernels are a GPU matter; compiling them here costs minutes of g++.

    Eager code computes the same functions. Can go when Megatron has a switch for its jit fuser.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]

    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    torch_module: Any = torch
    torch_module.compile = compile_with or compile_nothing


def _gloo_for_nccl() -> None:
    """``--distributed-backend`` is nccl unless told otherwise, and nccl needs a GPU: use gloo.

    Can go when Megatron picks its backend by device.
    """
    import torch.distributed as dist

    def with_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            return create(*args, **kwargs)

        return wrapper

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, with_gloo(getattr(dist, name)))


def _quiet() -> None:
    """Do not warn of what this platform has said already: there is no CUDA, nor what needs it.

    Megatron's data loader asks for pinned memory, its modules miss GPU packages and a setting of
    the driver, and torch's extension builder sees a CUDA toolkit without a device. Can go with
    the warnings.
    """
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator.*")
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
    warnings.filterwarnings("ignore", message=".*transformer-engine.*your version is 0.0.0.*")
    builder_log = logging.getLogger("torch.utils.cpp_extension")
    builder_log.addFilter(lambda record: "No CUDA runtime is found" not in record.getMessage())


def _loader_has_own_generator() -> None:
    """Keep data loaders away from the generator that stands for the device's.

    A loader's iterator draws a seed from the default generator. With CUDA that is the host's
    stream; here dropout uses the same one, so a resumed run, which builds its loaders after the
    random states were restored, would not repeat the losses. Can go with the one-generator rule.
    """
    init = torch.utils.data.DataLoader.__init__

    @functools.wraps(init)
    def with_generator(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
            kwargs["generator"].manual_seed(torch.initial_seed())
        init(self, *args, **kwargs)

    loader: Any = torch.utils.data.DataLoader
    loader.__init__ = with_generator
