"""What travels together between a layer and host memory, and where it is at the moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_memo.swap.backend import Event
from megatron_memo.swap.host import HostBlock


class Place(Enum):
    """Where a group's tensors can be read."""

    SOURCE = auto()  # the tensors that forward made are still there
    HOST = auto()  # only host memory has them
    BUFFER = auto()  # on their way to, or in, device memory that was taken for them
    GONE = auto()  # released


class Reads(NamedTuple):
    """The steps of a layer (counted in forward) whose backward reads a group.

    Backward walks the steps down, so `first` is the higher number.
    """

    first: int
    last: int


FIRST_STEP = Reads(0, 0)


class Landing(Protocol):
    """Device memory of somebody else that a group comes back into, instead of its own buffer.

    It must not lead to the group's context, or a graph that is dropped could not free it.
    """

    def pieces(self, new_buffer: Callable[[int], Tensor]) -> Sequence[tuple[Tensor, int]]:
        """Flat uint8 device memory, and the byte of the host block that goes to its start.

        Args:
            new_buffer: gives so many bytes of device memory (flat uint8).
        """

    def let_go(self) -> None:
        """Nothing will come into the memory any more, and nobody reads it there."""


@dataclass
class Stored:
    """One storage: `nbytes` at `offset` of its group's host block and buffer.

    Attributes:
        key: address and size of the storage, for as long as `source` keeps it alive.
        source: flat uint8 over the storage, until the group is retired.
        watched: the tensor itself, likewise: its version counter tells of changes.
    """

    group: "Group"
    offset: int
    nbytes: int
    key: tuple[int, int]
    source: Tensor | None
    watched: Tensor | None
    version: int


@dataclass
class Group:
    """Storages that were put between two flushes of a context.

    Attributes:
        reads: which steps read it in backward.
        landing: where it comes back to; None for a buffer of its own.
        read: compute has waited for h2d.
    """

    stored: list[Stored] = field(default_factory=list)
    nbytes: int = 0
    place: Place = Place.SOURCE
    reads: Reads = FIRST_STEP
    landing: Landing | None = None
    host: HostBlock | None = None
    d2h: Event | None = None
    h2d: Event | None = None
    buffer: Tensor | None = None
    read: bool = False


@dataclass(frozen=True)
class Handle:
    """How to rebuild a tensor from its storage's bytes."""

    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int  # in elements

    @property
    def offset(self) -> int:
        """The byte of the group's host block at which the tensor's first element is."""
        return self.stored.offset + self.storage_offset * self.dtype.itemsize
