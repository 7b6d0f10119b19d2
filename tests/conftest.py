"""What every test shares: one thread a process, the `gpu` marker, Megatron without CUDA."""

import os

# Before torch is imported, here and in every process a test starts: the machines that run these
# tests have two cores, and two ranks with two threads each spend their time waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from megatron_memo import platform

# Asked before the CPU platform answers in CUDA's place.
HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Before any test imports megatron, whichever test comes first; a second call does nothing.
    # What has to be seen in a process without it runs in a process of its own.
    platform.activate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device, and say that this is why."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
