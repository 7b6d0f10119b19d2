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


# Folders whose files take longest, first: with short files last, `--dist loadfile` leaves no
# process with a long file to itself at the end.
LONG = ("launch", "layer", "allocator", "ops", "profile", "estimate", "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; skip tests marked `gpu` where torch sees no CUDA device, and say why."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
