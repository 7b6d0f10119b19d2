"""Which device stands for CUDA in this process, and whose kernels it shows.

Two flavours: CPU tensors, on which Megatron really trains, and meta tensors, which have shapes and
no data, on which a profile runs Megatron at any size (see ``profile``).
"""

from __future__ import annotations

import torch

FLAVOURS = ("cpu", "meta")

_device = torch.device("cpu")
_memory: int | None = None


def device() -> torch.device:
    """What ``"cuda"`` means here."""
    return _device


def on_meta() -> bool:
    """True where tensors of "the device" have no data."""
    return _device.type == "meta"


def memory() -> int | None:
    """Bytes of the device that is played; None: this machine's own."""
    return _memory


def set_device(flavour: str, memory: int | None = None) -> None:
    """Choose one of ``FLAVOURS``; ``platform``'s two functions do, once.

    Args:
        flavour: the device.
        memory: bytes that it says it has; None for this machine's.
    """
    global _device, _memory
    assert flavour in FLAVOURS, flavour
    _device, _memory = torch.device(flavour), memory
