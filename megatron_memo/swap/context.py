"""What one layer saved for one micro-batch, on its way to host memory and back."""

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_memo.swap.backend import Copy
from megatron_memo.swap.group import Group, Handle, Landing, Place, Reads, Stored

if TYPE_CHECKING:
    from megatron_memo.swap.engine import SwapEngine

ALIGNMENT = 256  # bytes; what CUDA's copy engines and every dtype like


class LayerContext:
    """Swapped tensors of one (layer, micro-batch), in groups; see the protocol in `swap.engine`.

    A group's life: `put` and `flush` in forward, `retire` some steps later, `fetch` some steps
    before backward reads it, `get` in backward, `let_go` when its last reader is done, `release`
    with all others at the layer's end. Until then its host block has it, and a `get` after
    `let_go` fetches it again.

    Attributes:
        step: the forward's step; counted up by `swap.layer_pass`.
        gone: released.
    """

    def __init__(self, engine: "SwapEngine"):
        self.engine = engine
        self.step = 0
        self.gone = False
        self._groups: list[Group] = []
        self._open = Group()
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
                *(self._open, self._open.nbytes, storage.nbytes(), key),
                *(source, t.detach(), t._version),
            )
            self._open.stored.append(stored)
            self._open.nbytes += _aligned(storage.nbytes())
            self._by_address[key] = stored
        return Handle(stored, t.dtype, t.size(), t.stride(), int(t.storage_offset()))

    def flush(self, reads: Reads | None = None, landing: Landing | None = None) -> Group | None:
        """Starts the copy of everything put since the last flush, which is a group from here on.

        Args:
            reads: the steps whose backward reads it; the present one if None.
            landing: where it comes back to; a buffer of its own if None.

        Returns:
            The group; None if nothing was put.
        """
        group = self._open
        if not group.stored:
            return None
        host = self.engine.host.take(group.nbytes)  # may fail, and then nothing has happened
        self._open, group.host, group.landing = Group(), host, landing
        group.reads = Reads(self.step, self.step) if reads is None else reads
        self._groups.append(group)
        copies = [
            Copy(stored.source, host, stored.offset)
            for stored in group.stored
            if stored.source is not None
        ]
        group.d2h = self.engine.start_d2h(copies)  # the only place where D2H starts
        return group

    def groups(self, since: int = 0) -> list[Group]:
        """Groups in the order in which they were flushed, from number `since` on."""
        return self._groups[since:]

    def retire(self, groups: list[Group] | None = None) -> None:
        """Gives up the forward's tensors (of all groups if None): only host memory has them now."""
        chosen = self._groups if groups is None else groups
        retiring = [group for group in chosen if group.place is Place.SOURCE]
        for group in retiring:
            self.engine.retire_after_d2h(group.d2h)
        sources = [s.source for g in retiring for s in g.stored if s.source is not None]
        for group in retiring:
            group.place = Place.HOST
            for stored in group.stored:
                stored.source = stored.watched = None
                self._by_address.pop(stored.key, None)
        self.engine.let_go(sources)

    # ---- backward

    def fetch_first_read_in(self, step: int) -> None:
        """Starts the way back of the groups that backward reads first in `step`."""
        for group in self._groups:
            if group.reads.first == step:
                self.fetch(group)

    def prefetch(self) -> None:
        """Starts the way back of all groups, in the order in which backward reads them."""
        for group in sorted(self._groups, key=lambda group: -group.reads.first):
            self.fetch(group)

    def fetch(self, group: Group) -> None:
        """Starts a group's way back into device memory, if the forward's tensors are gone."""
        if group.place is Place.HOST:
            landing = group.landing
            into = None if landing is None else list(landing.pieces(self.engine.new_buffer))
            self._start_h2d(group, into)

    def _start_h2d(self, group: Group, pieces: list[tuple[Tensor, int]] | None) -> None:
        group.place, group.read = Place.BUFFER, False
        if pieces is None:
            group.buffer = self.engine.new_buffer(group.nbytes)
            pieces = [
                (group.buffer[s.offset : s.offset + s.nbytes], s.offset) for s in group.stored
            ]
        ready = self.engine.buffer_is_free()
        assert group.host is not None
        copies = [Copy(device, group.host, offset) for device, offset in pieces]
        group.h2d = self.engine.start_h2d(copies, ready)  # the only place where H2D starts

    def wait_for(self, group: Group) -> None:
        """From here on compute may read what `fetch` brings back."""
        if group.place is Place.BUFFER and not group.read:
            self.engine.read_after_h2d(group.h2d)
            group.read = True

    def get(self, handle: Handle) -> Tensor:
        """The tensor behind `handle`, wherever it is; waits for its group's copy only.

        Raises:
            RuntimeError: after `release`, that is when a graph is walked a second time.
        """
        if self.gone:
            raise RuntimeError(
                "an activation that memo swapped was asked for after its layer's backward had "
                "ended. Backward through a memo layer can run only once, even with retain_graph."
            )
        stored, group = handle.stored, handle.stored.group
        if group.place is Place.SOURCE:
            assert stored.source is not None and stored.watched is not None
            check_unchanged(stored.watched, stored.version)
            flat = stored.source
        else:
            if group.buffer is None:  # let go, not yet fetched, or landed where others read it;
                # then this copy comes after the one that landed, so who waits for it waits for both
                self._start_h2d(group, None)
            self.wait_for(group)
            assert group.buffer is not None
            flat = group.buffer[stored.offset : stored.offset + stored.nbytes]
        typed = flat.view(handle.dtype)
        return typed.as_strided(
            handle.size, handle.stride, typed.storage_offset() + handle.storage_offset
        )

    def let_go_before(self, step: int) -> None:
        """Backward begins with `step`: gives up the groups that only earlier ones read."""
        for group in self._groups:
            if group.reads.last > step:
                self.let_go(group)

    def let_go(self, group: Group) -> None:
        """Gives up a group's device memory; its host block keeps it."""
        self.retire([group])
        if group.place is not Place.BUFFER:
            return
        group.place = Place.HOST
        if not group.read:
            self.engine.free_after_h2d(group.h2d)
        if group.landing is not None:
            group.landing.let_go()
        held = [] if group.buffer is None else [group.buffer]
        group.buffer = group.h2d = None
        self.engine.let_go(held)

    def release(self) -> None:
        """The layer's backward has ended: buffers and host memory may serve others."""
        if self.gone:
            return
        self.gone = True
        for group in self._groups:
            self.let_go(group)
            group.place, group.landing = Place.GONE, None
            if group.host is not None:
                self.engine.host.give_back(group.host)
                group.host = None
            group.stored.clear()
        self._groups.clear()
        self._by_address.clear()

    def __del__(self) -> None:
        # A graph that is dropped without a backward (an exception, a forward for its value only).
        # The garbage collector may call this on any thread, a copy thread that would wait for
        # itself or one with another current stream: the engine releases it at its next layer.
        if not self.gone and not sys.is_finalizing():
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
