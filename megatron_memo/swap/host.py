"""Host memory for swapped activations: one exact slab, cut into blocks, reused every iteration.

NOTE: how the slab comes about
------------------------------
Nobody knows the sizes before the first iteration has asked for them. It gets a mapping of the exact
size for each block that no mapping at hand has room for. When all blocks have come back, a new pass
begins, and these mappings are many, or are much beside the largest one, then they make room for one
slab of as many bytes as were in use at most. From then on blocks are cut from it, at the same
offsets in each iteration.

A longer sequence adds mappings in the same way, and a shorter one uses a part of what is there: the
pool holds what the largest pass needed, and little more (see `_worth_one_slab`).
"""

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_memo.sizes import size_words
from megatron_memo.swap.extents import Extents

HUGE_PAGE = 2 << 20
# Mappings beside the largest one that are let be: so many, or such a part of it.
_FEW_MAPPINGS, _SMALL_PART = 8, 8


class HostBlock:
    """`nbytes` of page-aligned host memory, outside of torch's allocators.

    torch's pinned allocator rounds sizes up to a power of two, which can double host memory; an
    anonymous mapping has the exact size and can be registered with CUDA in place. Its pages come
    from the system when they are first written to, or registered; in huge ones where it has them.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, nbytes)
        if nbytes >= HUGE_PAGE:
            with suppress(OSError):  # a kernel without them: ordinary pages serve as well
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        with _disable_current_modes():  # not a device tensor: storage accounting must not see it
            self.tensor: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.array = self.tensor.numpy()

    def close(self) -> None:
        """Gives the memory back to the system; the mapping goes with its last view."""
        del self.tensor, self.array, self._mapping


class Cut(HostBlock):
    """A block that lies in a larger one, which outlives it."""

    def __init__(self, slab: "_Slab", start: int, nbytes: int):
        self.slab, self.start, self.nbytes = slab, start, nbytes

    def __getattr__(self, name: str) -> Any:
        if name not in ("tensor", "array"):
            raise AttributeError(name)
        # Views made when they are asked for: profiles count blocks that have no memory.
        return getattr(self.slab.block, name)[self.start : self.start + self.nbytes]

    def close(self) -> None:
        """The slab's pool closes the slab."""


class _Slab:
    """A block of its own mapping, and what is taken of it."""

    def __init__(self, block: HostBlock):
        self.block = block
        self.nbytes = block.nbytes
        self.extents = Extents(block.nbytes)

    def cut(self, nbytes: int) -> Cut | None:
        start = self.extents.take(nbytes)
        return None if start is None else Cut(self, start, nbytes)


class HostPool:
    """The slab of one process; see the NOTE. A block goes back when its data has been consumed.

    Args:
        new_block: makes a block with a mapping of its own.
        quiesce: waits for every copy under way; called before a mapping is given up, since a copy
            of a graph that was dropped may still be writing to it.
        limit: bytes that the pool may hold; None for no limit.

    Attributes:
        total_bytes: held, taken or idle.
        taken: bytes of the blocks that somebody has.
    """

    disk_bytes = 0  # it has no disk; see `swap.tiers`

    def __init__(
        self,
        new_block: Callable[[int], HostBlock],
        quiesce: Callable[[], None],
        limit: int | None = None,
    ):
        self._new_block = new_block
        self._quiesce = quiesce
        self._limit = limit
        self._slabs: list[_Slab] = []
        self.taken = self._most_taken = 0
        self.total_bytes = 0

    def take(self, nbytes: int) -> HostBlock:
        """A block of `nbytes`.

        Raises:
            MemoryError: the system or the limit has no more; nothing is lost then.
        """
        if self.taken == 0 and self._worth_one_slab():
            self._make_one_slab()
        cut = self._cut(nbytes)
        if cut is None:
            self.give_up_idle(nbytes)
            cut = self._add(nbytes).cut(nbytes)
            assert cut is not None
        self.taken += nbytes
        self._most_taken = max(self._most_taken, self.taken)
        return cut

    def give_back(self, block: HostBlock) -> None:
        """The block may serve the next taker."""
        assert isinstance(block, Cut)
        block.slab.extents.give_back(block.start, block.nbytes)
        self.taken -= block.nbytes

    def give_up_idle(self, wanted: float = math.inf) -> None:
        """Closes mappings of which nothing is taken, largest first, until `wanted` bytes have gone
        or none is left."""
        idle = sorted((s for s in self._slabs if not s.extents.taken), key=lambda s: s.nbytes)
        if idle:
            self._quiesce()
        while wanted > 0 and idle:
            slab = idle.pop()
            self._slabs.remove(slab)
            slab.block.close()
            self.total_bytes -= slab.nbytes
            wanted -= slab.nbytes

    def _cut(self, nbytes: int) -> Cut | None:
        for slab in self._slabs:
            cut = slab.cut(nbytes)
            if cut is not None:
                return cut
        return None

    def _add(self, nbytes: int) -> _Slab:
        if self._limit is not None and self.total_bytes + nbytes > self._limit:
            raise self._no_more(
                nbytes,
                f"the budget is {size_words(self._limit)}",
                "Raise --memo-host-budget, lower --memo-swap-ratio",
            )
        try:
            block = self._new_block(nbytes)
        except (OSError, MemoryError) as error:
            raise self._no_more(
                nbytes,
                str(error),
                "Lower --memo-swap-ratio (or --memo-host-budget, which a ratio of auto follows)",
            ) from error
        slab = _Slab(block)
        self._slabs.append(slab)
        self.total_bytes += nbytes
        return slab

    def _make_one_slab(self) -> None:
        largest = max(slab.nbytes for slab in self._slabs)
        # If that had room for all, and yet did not do, it was for gaps: then with some to spare.
        nbytes = self._most_taken if self._most_taken > largest else self.total_bytes
        self.give_up_idle()
        with suppress(MemoryError):  # nothing is lost: each taker gets a mapping, or is told
            self._add(nbytes)

    def _worth_one_slab(self) -> bool:
        """Making one takes time, page-locking most of all: not for a few bytes."""
        largest = max((slab.nbytes for slab in self._slabs), default=0)
        beside = self.total_bytes - largest
        return len(self._slabs) > _FEW_MAPPINGS or beside * _SMALL_PART > largest

    def _no_more(self, nbytes: int, why: str, remedy: str) -> MemoryError:
        return MemoryError(
            f"memo holds {size_words(self.total_bytes)} of host memory and could not get another "
            f"{size_words(nbytes)} ({why}). {remedy}, raise --memo-resident-layers, or run fewer "
            "ranks a node."
        )
