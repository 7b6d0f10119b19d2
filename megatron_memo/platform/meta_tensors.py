"""What Megatron and this package read from a tensor, answered for tensors without data.

Why: a profile runs the real training code on meta tensors. Now and then that code reads a value (a
gradient norm, a flag), or knows a tensor by its address. Both are answered as in a healthy run on a
device, so that the code goes on as it would there. Can go when nothing is read on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_memo.platform import stand_in

# An address is the storage's identity, far enough apart that no tensor reaches into another.
_ADDRESS_SHIFT = 48


def install(healthy_value: Callable[[torch.Tensor], Any]) -> None:
    """Install every shim of this file.

    Args:
        healthy_value: what a one-element tensor would hold in a healthy run.
    """
    _addresses()
    _values(healthy_value)
    _copies_to_the_host()
    _autocast()


def _addresses() -> None:
    """Every meta storage is at address 0; give each its own, as long as it lives."""
    storage: Any = torch.UntypedStorage
    tensor: Any = torch.Tensor
    storage_address, tensor_address = storage.data_ptr, tensor.data_ptr

    @functools.wraps(storage_address)
    def storage_data_ptr(self: torch.UntypedStorage) -> int:
        if self.device.type != "meta":
            return storage_address(self)
        return self._cdata << _ADDRESS_SHIFT if self.nbytes() else 0

    @functools.wraps(tensor_address)
    def tensor_data_ptr(self: torch.Tensor) -> int:
        if self.device.type != "meta":
            return tensor_address(self)
        start = self.untyped_storage().data_ptr()
        return start + int(self.storage_offset()) * self.element_size() if self.numel() else 0

    storage.data_ptr = storage_data_ptr
    tensor.data_ptr = tensor_data_ptr


def _values(healthy_value: Callable[[torch.Tensor], Any]) -> None:
    """Reads of one value, and of a list of them."""
    tensor: Any = torch.Tensor

    def answered(read: Callable[..., Any], convert: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def wrapper(self: torch.Tensor, *args: Any) -> Any:
            if self.device.type != "meta":
                return read(self, *args)
            return convert(healthy_value(self))

        return wrapper

    conversions: dict[str, Callable[[Any], Any]] = {
        "item": lambda value: value,
        "__bool__": bool,
        "__int__": int,
        "__index__": int,
        "__float__": float,
    }
    for name, convert in conversions.items():
        setattr(tensor, name, answered(getattr(tensor, name), convert))

    to_list = tensor.tolist

    @functools.wraps(to_list)
    def tolist(self: torch.Tensor) -> Any:
        if self.device.type != "meta":
            return to_list(self)
        value = healthy_value(self)
        for size in reversed(self.shape):
            value = [value] * size
        return value

    tensor.tolist = tolist


def _copies_to_the_host() -> None:
    """A copy of a meta tensor on the host is zeros: the host has data, so it must have some."""
    tensor: Any = torch.Tensor

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type != "meta":
            return self.to("cpu")
        return torch.zeros(self.shape, dtype=self.dtype)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to(stand_in.device())

    def module_cuda(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self._apply(lambda t: t.to(stand_in.device()))

    tensor.cpu = cpu
    tensor.cuda = cuda
    module: Any = torch.nn.Module
    module.cuda = module_cuda


def _autocast() -> None:
    """There is no autocast of meta tensors; who asks by a tensor's device type gets the CPU's."""
    module: Any = torch

    def of_cpu(ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def wrapper(kind: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
            return ask("cpu" if kind == "meta" else kind, *args, **kwargs)

        return wrapper

    for name in ("get_autocast_dtype", "is_autocast_enabled"):
        setattr(module, name, of_cpu(getattr(module, name)))

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    module.autocast = Autocast
