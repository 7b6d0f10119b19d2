"""Host memory for swapped activations: exact sizes, kept and reused from iteration to iteration."""

import math
import mmap
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

    def close(self) -> None:
        """Gives the memory back to the system; the mapping goes with its last view."""
        del self.tensor, self.array, self._mapping


class HostPool:
    """Blocks by exact size. A block goes back when its owner's data has been consumed.

    The same layers ask for the same sizes in every micro-batch and iteration, so after the first
    iteration nothing is allocated any more. When sequence lengths vary, idle blocks of other sizes
    are given up before new ones are made, so the pool holds what one pass needs at most.

    Args:
        new_block: makes a block.
        quiesce: waits for every copy under way; called before a block is given up, since a copy
            of a graph that was dropped may still be writing to it.
    """

    def __init__(self, new_block: Callable[[int], HostBlock], quiesce: Callable[[], None]):
        self._new_block = new_block
        self._quiesce = quiesce
        self._idle: dict[int, list[HostBlock]] = {}
        self.total_bytes = 0

    def take(self, nbytes: int) -> HostBlock:
        """A block of exactly `nbytes`, reused if one is idle.

        Raises:
            MemoryError: the system has no more; nothing has changed then.
        """
        if self._idle.get(nbytes):
            return self._idle[nbytes].pop()
        self.give_up_idle(nbytes)
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
        """The block may serve the next taker."""
        self._idle.setdefault(block.nbytes, []).append(block)

    def give_up_idle(self, wanted: float = math.inf) -> None:
        """Closes idle blocks, largest first, until `wanted` bytes are free or none is idle."""
        idle = sorted(size for size, blocks in self._idle.items() for _ in blocks)
        if idle:
            self._quiesce()
        while wanted > 0 and idle:
            size = idle.pop()
            self._idle[size].pop().close()
            self.total_bytes -= size
            wanted -= size
