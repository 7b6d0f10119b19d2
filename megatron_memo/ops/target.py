"""Whose kernels an operator shows where tensors have no data."""

from __future__ import annotations

from torch import Tensor

DEVICES = ("cuda", "cpu")

_shown = "cuda"


def show_kernels_of(device: str) -> None:
    """From now on, operators on meta tensors allocate what `device`'s kernels do."""
    global _shown
    assert device in DEVICES, device
    _shown = device


def kernels_for(t: Tensor) -> str:
    """ "cuda" or "cpu": whose kernels work on `t`, or would if it had data."""
    if t.is_meta:
        return _shown
    return "cuda" if t.is_cuda else "cpu"
