"""The whole-sequence step of a layer: core attention, run once, under hooks of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_memo.layer.chunks import Chunk, Fate
from megatron_memo.layer.rows import Rows
from megatron_memo.layer.segment import Segment
from megatron_memo.swap.context import Handle, LayerContext


class QkvStore:
    """q, k and v between forward and backward: swapped rows in host memory, the rest recomputed.

    Args:
        context: where swapped rows are.
    """

    def __init__(self, context: LayerContext):
        self._context = context
        self._parts: list[tuple[Rows, Segment, list[Handle] | None]] = []
        self._whole: list[Tensor | None] = []
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def add(self, chunk: Chunk, rows: Rows, segment: Segment, qkv: tuple[Tensor, ...]) -> None:
        """Notes a chunk's q, k and v; those of a swapped chunk go to the context.

        Args:
            chunk: whose fate decides.
            rows: its rows in tensors over the whole sequence.
            segment: computes q, k and v from the layer input; asked again if they were dropped.
            qkv: what it computed.
        """
        handles = None
        if chunk.fate is Fate.SWAP:
            contiguous = [t.detach().contiguous() for t in qkv]
            handles = self._context.put_all(contiguous)
        self._parts.append((rows, segment, handles))

    def describe(self, whole: tuple[Tensor, ...]) -> None:
        """Notes what q, k and v of the whole sequence look like (contiguous)."""
        self._like = [(t.shape, t.dtype, t.device) for t in whole]

    def take(self, index: int) -> Tensor:
        """q (0), k (1) or v (2) of the whole sequence; each once for each assembly."""
        if not self._whole or self._whole[index] is None:
            self._assemble()
        t = self._whole[index]
        assert t is not None
        self._whole[index] = None
        return t

    def _assemble(self) -> None:
        whole: list[Tensor | None] = [None] * len(self._like)
        for rows, segment, handles in self._parts:
            if handles is not None:
                parts = [self._context.get(handle) for handle in handles]
            else:
                parts = list(segment.take_outputs())
            for i, (shape, dtype, device) in enumerate(self._like):
                if rows.all:
                    whole[i] = parts[i].contiguous()
                    continue
                target = whole[i]
                if target is None:
                    target = whole[i] = torch.empty(shape, dtype=dtype, device=device)
                view = rows.view(target)
                view.copy_(parts[i].reshape(view.shape))
        self._whole = whole


class AttentionStep:
    """Runs `attend(q, k, v)` and stores what it saves.

    q, k and v are known by the address of their first element and come from a `QkvStore`; the
    output is swapped, and a saved view of it is taken from there; anything else that the kernel
    saves (log-sum-exp, a copy of its own making) is swapped as it is.
    """

    def __init__(self, context: LayerContext, store: QkvStore, min_swap_bytes: int):
        self._context = context
        self._store = store
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
