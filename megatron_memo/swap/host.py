"""Host memory for swapped activations: exact sizes, kept and reused from iteration to iteration."""

import mmap
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class HostBlock:
    """`nbytes` of page-aligned host memory, outside of torch's allocators.

    torch's pinned allocator rounds sizes up to a power of two, which can double host memory; an
    anonymous mapping has the exact size and can be registered with CUDA in place.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, nbytes)
        with _disable_current_modes():  # not a device tensor: storage accounting must not see it
            self.tensor: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.array = self.tensor.numpy()


class HostPool:
    """Blocks by exact size. A block goes back when its owner's data has been consumed.

    The same layers ask for the same sizes in every micro-batch and iteration, so after the first
    iteration nothing is allocated any more.
    """

    def __init__(self, new_block: Callable[[int], HostBlock]):
        self._new_block = new_block
        self._free: dict[int, list[HostBlock]] = defaultdict(list)
        self.total_bytes = 0

    def take(self, nbytes: int) -> HostBlock:
        """A block of exactly `nbytes`, reused if one is free."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        try:
            block = self._new_block(nbytes)
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"memo holds {self.total_bytes / 2**30:.2f} GiB of host memory and could not get "
                f"another {nbytes / 2**30:.2f} GiB ({error}). Lower --memo-swap-ratio, raise "
                "--memo-resident-layers, or run fewer ranks a node."
            ) from error
        self.total_bytes += nbytes
        return block

    def give_back(self, block: HostBlock) -> None:
        self._free[block.nbytes].append(block)
