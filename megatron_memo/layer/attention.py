"""The whole-sequence step of a layer: core attention, run once, under hooks of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_memo.layer.chunks import Chunk, Fate
from megatron_memo.layer.landing import PartLanding, WholeTensors
from megatron_memo.layer.rows import Rows
from megatron_memo.layer.segment import Segment
from megatron_memo.swap.context import LayerContext
from megatron_memo.swap.group import Group, Handle, Place, Reads


class _Part(NamedTuple):
    """A chunk's q, k and v. One of `group` and `segment` has them.

    Attributes:
        handles: of a swapped chunk.
        group: that they are in; None where they share storages with what other groups have.
    """

    rows: Rows
    segment: Segment
    handles: list[Handle] | None
    group: Group | None


class QkvStore:
    """q, k and v between forward and backward: swapped rows in host memory, the rest recomputed.

    Args:
        context: where swapped rows are.
        read_in: the step of the layer whose backward reads them: the attention.
    """

    def __init__(self, context: LayerContext, read_in: int):
        self._context = context
        self._reads = Reads(read_in, read_in)
        self._parts: list[_Part] = []
        self._whole = WholeTensors()
        self._ready: set[int] = set()  # those of the last assembly that have not been taken

    def add(self, chunk: Chunk, rows: Rows, segment: Segment, qkv: tuple[Tensor, ...]) -> None:
        """Notes a chunk's q, k and v; those of a swapped chunk go to the context.

        Args:
            chunk: whose fate decides.
            rows: its rows in tensors over the whole sequence.
            segment: computes q, k and v from the layer input; asked again if they were dropped.
            qkv: what it computed.
        """
        handles = group = None
        if chunk.fate is Fate.SWAP:
            self._context.flush()  # the segment's own, which its backward reads and no other
            handles = self._context.put_all([t.detach().contiguous() for t in qkv])
            landing = PartLanding(self._whole, rows, handles)
            group = self._context.flush(self._reads, landing)
            if group is not None and any(h.stored.group is not group for h in handles):
                group.landing = None  # its buffer and others': the handles know
                group = None
        self._parts.append(_Part(rows, segment, handles, group))

    def describe(self, whole: tuple[Tensor, ...]) -> None:
        """Notes what q, k and v of the whole sequence look like (contiguous)."""
        self._whole.describe(whole)

    def take(self, index: int) -> Tensor:
        """q (0), k (1) or v (2) of the whole sequence; each once for each assembly."""
        if index not in self._ready:
            self._assemble()
        self._ready.discard(index)
        return self._whole.take(index)

    def _assemble(self) -> None:
        context = self._context
        landing = [part.group for part in self._parts if part.group is not None]
        if not self._whole.complete:  # not yet fetched, or taken before
            for group in landing:
                if group.place is Place.BUFFER:
                    context.let_go(group)
            for group in landing:
                context.fetch(group)
        for part in self._parts:
            if part.group is not None and part.group.place is Place.BUFFER:
                continue  # it comes by itself
            if part.handles is not None:
                tensors = [context.get(handle) for handle in part.handles]
            else:
                tensors = list(part.segment.take_outputs())
            if part.rows.all:
                self._whole.put([t.contiguous() for t in tensors])
                continue
            for whole, t in zip(self._whole.all(context.engine.new_buffer), tensors, strict=True):
                view = part.rows.view(whole)
                view.copy_(t.reshape(view.shape))
        for group in landing:
            context.wait_for(group)
        self._ready = {0, 1, 2}


class AttentionStep:
    """Runs `attend(q, k, v)` and stores what it saves.

    q, k and v are known by the address of their first element and come from a `QkvStore`; the
    output is swapped, and a saved view of it is taken from there; anything else that the kernel
    saves (log-sum-exp, a copy of its own making) is swapped as it is.

    Args:
        context: where swapped tensors go.
        store: has q, k and v.
        output_reads: the steps whose backward reads the output.
        min_swap_bytes: what else is saved and smaller stays.
    """

    def __init__(
        self, context: LayerContext, store: QkvStore, output_reads: Reads, min_swap_bytes: int
    ):
        self._context = context
        self._store = store
        self._output_reads = output_reads
        self._min_swap_bytes = min_swap_bytes
        self.output: Handle | None = None

    def run(self, attend: Callable[..., Tensor], qkv: tuple[Tensor, ...]) -> Tensor:
        """[s, b, h/tp] output of core attention."""
        known = {t.data_ptr(): (i, t.numel()) for i, t in enumerate(qkv)}
        self._store.describe(qkv)
        waiting: list[_Saved] = []

        def pack(t: Tensor) -> Any:
            index, numel = known.get(t.data_ptr(), (None, None))
            if index is not None and numel == t.numel():
                return _OfQkv(index, t.size(), t.stride())
            saved = _Saved(t.detach())
            waiting.append(saved)
            return saved

        with saved_tensors_hooks(pack, self._unpack):
            output = attend(*qkv)
        self._place(output.detach(), waiting)
        return output

    def _place(self, output: Tensor, waiting: list["_Saved"]) -> None:
        """Puts the output, then what shares its storage is there already; the rest by size."""
        self.output = self._context.put(output)
        self._context.flush(self._output_reads)
        for saved in waiting:
            t = saved.kept
            assert t is not None
            if t.untyped_storage().nbytes() >= self._min_swap_bytes:
                saved.handle, saved.kept = self._context.put(t), None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _OfQkv):
            return self._store.take(packed.index).as_strided(packed.size, packed.stride)
        if packed.handle is None:
            return packed.kept
        return self._context.get(packed.handle)

    def fetch_output(self) -> Tensor:
        """The output again, in backward."""
        assert self.output is not None
        return self._context.get(self.output)


class _OfQkv:
    def __init__(self, index: int, size: torch.Size, stride: tuple[int, ...]):
        self.index, self.size, self.stride = index, size, stride


class _Saved:
    def __init__(self, kept: Tensor):
        self.kept: Tensor | None = kept
        self.handle: Handle | None = None
