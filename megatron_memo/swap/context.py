"""What one layer saved for one micro-batch, on its way to host memory and back."""

import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_memo.swap.backend import Copy, Event
from megatron_memo.swap.host import HostBlock

if TYPE_CHECKING:
    from megatron_memo.swap.engine import SwapEngine

ALIGNMENT = 256  # bytes; what CUDA's copy engines and every dtype like


class Place(Enum):
    """Where a context's tensors can be read."""

    SOURCE = auto()  # the tensors that forward made are still there
    HOST = auto()  # only host memory has them
    BUFFER = auto()  # on their way to, or in, a device buffer
    GONE = auto()  # released


@dataclass
class Stored:
    """One storage of the context: `nbytes` at `offset` of its group's host block and buffer."""

    group: "Group"
    offset: int
    nbytes: int
    source: Tensor | None  # flat uint8 over the storage, until the context is retired
    watched: Tensor | None  # the tensor itself, likewise: its version counter tells of changes
    version: int


@dataclass
class Group:
    """Storages that travel together: those put between two flushes."""

    stored: list[Stored] = field(default_factory=list)
    nbytes: int = 0
    host: HostBlock | None = None
    d2h: Event | None = None
    h2d: Event | None = None
    buffer: Tensor | None = None
    read: bool = False  # compute has waited for h2d


@dataclass(frozen=True)
class Handle:
    """How to rebuild a tensor from its storage's bytes."""

    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int  # in elements


class LayerContext:
    """Swapped tensors of one (layer, micro-batch); see the protocol in `swap.engine`.

    Life: `put` and `flush` in forward, `retire` two layers later, `prefetch` when the layer above
    starts its backward, `get` in the layer's own backward, `release` at that backward's end.
    """

    def __init__(self, engine: "SwapEngine"):
        self.engine = engine
        self.place = Place.SOURCE
        self._groups: list[Group] = []
        self._open = Group()
        self._buffer: Tensor | None = None
        # Storages seen, by address. Each is kept alive by its `source` for as long as the entry is
        # here, so an address cannot come back for another storage.
        self._by_address: dict[tuple[int, int], Stored] = {}

    # ---- forward

    def put(self, tensor: Tensor) -> Handle:
        """Notes a tensor for the next flush. Tensors that share a storage share one copy.

        A view of less than half of its storage is copied out first, so that the rest of the
        storage is neither moved nor pinned.
        """
        return self.put_all([tensor])[0]

    def put_all(self, tensors: list[Tensor]) -> list[Handle]:
        """`put` for pieces of one storage, judged by what they cover together."""
        tensors = [t.detach() for t in tensors]
        covered: dict[int, int] = {}
        for t in tensors:
            key = t.untyped_storage().data_ptr()
            covered[key] = covered.get(key, 0) + t.numel() * t.element_size()
        handles = []
        for t in tensors:
            storage = t.untyped_storage()
            if 2 * covered[storage.data_ptr()] < storage.nbytes():
                t = t.clone(memory_format=torch.contiguous_format)
            handles.append(self._put_storage(t))
        return handles

    def _put_storage(self, t: Tensor) -> Handle:
        storage = t.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        stored = self._by_address.get(key)
        if stored is None:
            source = torch.empty(0, dtype=torch.uint8, device=t.device).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            stored = Stored(
                self._open, self._open.nbytes, storage.nbytes(), source, t.detach(), t._version
            )
            self._open.stored.append(stored)
            self._open.nbytes += _aligned(storage.nbytes())
            self._by_address[key] = stored
        return Handle(stored, t.dtype, t.size(), t.stride(), int(t.storage_offset()))

    def flush(self) -> None:
        """Starts the copy of everything put since the last flush."""
        group = self._open
        if not group.stored:
            return
        host = self.engine.host.take(group.nbytes)  # may fail, and then nothing has happened
        self._open, group.host = Group(), host
        self._groups.append(group)
        copies = [
            Copy(stored.source, host, stored.offset)
            for stored in group.stored
            if stored.source is not None
        ]
        group.d2h = self.engine.start_d2h(copies)

    def retire(self) -> None:
        """Gives up the forward's tensors; from here on only host memory has them."""
        if self.place is not Place.SOURCE:
            return
        self.place = Place.HOST
        for group in self._groups:
            self.engine.retire_after_d2h(group.d2h)
        sources = [s.source for g in self._groups for s in g.stored if s.source is not None]
        for group in self._groups:
            for stored in group.stored:
                stored.source = stored.watched = None
        self._by_address.clear()
        self.engine.let_go(sources)

    # ---- backward

    def prefetch(self) -> None:
        """Starts the way back into a device buffer, if the forward's tensors are gone."""
        if self.place is not Place.HOST or not self._groups:
            return
        self.place = Place.BUFFER
        nbytes = sum(group.nbytes for group in self._groups)
        buffer = self.engine.backend.device_buffer(nbytes, self.engine.device)
        self.engine.poison(buffer)
        self._buffer = buffer
        at = 0
        for group in self._groups:
            group.buffer = buffer[at : at + group.nbytes]
            at += group.nbytes
        ready = self.engine.buffer_is_free()
        # Groups come back in the order in which backward reads them: the last one put first.
        for group in reversed(self._groups):
            assert group.buffer is not None and group.host is not None
            copies = [
                Copy(group.buffer[s.offset : s.offset + s.nbytes], group.host, s.offset)
                for s in group.stored
            ]
            group.h2d = self.engine.start_h2d(copies, ready)

    def get(self, handle: Handle) -> Tensor:
        """The tensor behind `handle`, wherever it is; waits for its copy only.

        Raises:
            RuntimeError: after `release`, that is when a graph is walked a second time.
        """
        stored = handle.stored
        if self.place is Place.GONE:
            raise RuntimeError(
                "an activation that memo swapped was asked for after its layer's backward had "
                "ended. Backward through a memo layer can run only once, even with retain_graph."
            )
        if self.place is Place.HOST:
            self.prefetch()
        if self.place is Place.SOURCE:
            assert stored.source is not None and stored.watched is not None
            check_unchanged(stored.watched, stored.version)
            flat = stored.source
        else:
            group = stored.group
            if not group.read:
                self.engine.read_after_h2d(group.h2d)
                group.read = True
            assert group.buffer is not None
            flat = group.buffer[stored.offset : stored.offset + stored.nbytes]
        typed = flat.view(handle.dtype)
        return typed.as_strided(
            handle.size, handle.stride, typed.storage_offset() + handle.storage_offset
        )

    def release(self) -> None:
        """The layer's backward has ended: buffer and host memory may serve others."""
        if self.place is Place.GONE:
            return
        if self.place is Place.SOURCE:
            self.retire()
        self.place = Place.GONE
        for group in self._groups:
            if group.h2d is not None and not group.read:
                self.engine.free_after_h2d(group.h2d)
        for group in self._groups:
            group.buffer = None
            if group.host is not None:
                self.engine.host.give_back(group.host)
        self._groups.clear()
        self._by_address.clear()
        held = [] if self._buffer is None else [self._buffer]
        self._buffer = None
        self.engine.let_go(held)

    def __del__(self) -> None:
        # A graph that is dropped without a backward (an exception, a forward for its value only).
        # The garbage collector may call this on any thread, a copy thread that would wait for
        # itself or one with another current stream: the engine releases it at its next layer.
        if self.place is not Place.GONE and not sys.is_finalizing():
            self.engine.abandon(self)


def check_unchanged(t: Tensor, version: int) -> None:
    """What autograd checks for the tensors that it saves itself.

    Raises:
        RuntimeError: `t` was changed in place since its `version`.
    """
    if t._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(t.shape)} that backward needs was modified by an inplace "
            f"operation: it is at version {t._version}, forward saw version {version}."
        )


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
