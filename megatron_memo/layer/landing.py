"""q, k and v of the whole sequence, which chunks come back into from host memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_memo.layer.rows import Rows
from megatron_memo.swap.group import Handle


class WholeTensors:
    """Tensors over the whole sequence, made when the first part of them is to come.

    They are let go one by one as they are taken, or together when no part is to come any more.
    """

    def __init__(self) -> None:
        self._like: list[tuple[torch.Size, torch.dtype]] = []
        self._tensors: list[Tensor | None] = []
        self._landings: set[PartLanding] = set()  # with parts on their way, or in

    def describe(self, tensors: Sequence[Tensor]) -> None:
        """Notes what they look like (contiguous)."""
        self._like = [(t.shape, t.dtype) for t in tensors]

    @property
    def complete(self) -> bool:
        """All are there and none has been taken."""
        return bool(self._tensors) and all(t is not None for t in self._tensors)

    def all(self, new_buffer: Callable[[int], Tensor]) -> list[Tensor]:
        """The tensors, made anew where they are not there (see `swap.group.Landing`)."""
        if not self.complete:
            self._tensors = [
                new_buffer(shape.numel() * dtype.itemsize).view(dtype).view(shape)
                for shape, dtype in self._like
            ]
        return [t for t in self._tensors if t is not None]

    def put(self, tensors: list[Tensor]) -> None:
        """Takes ready ones instead."""
        self._tensors = list(tensors)

    def take(self, index: int) -> Tensor:
        """One of them, once."""
        t, self._tensors[index] = self._tensors[index], None
        assert t is not None
        return t

    def expect(self, landing: "PartLanding") -> None:
        self._landings.add(landing)

    def is_through(self, landing: "PartLanding") -> None:
        self._landings.discard(landing)
        if not self._landings:
            self._tensors = []


class PartLanding:
    """A chunk's rows of `WholeTensors`; see `swap.group.Landing`.

    Args:
        whole: where the rows are.
        rows: the chunk's.
        handles: the chunk's tensors in host memory, one for each of the whole ones.
    """

    def __init__(self, whole: WholeTensors, rows: Rows, handles: Sequence[Handle]):
        self._whole = whole
        self._rows = rows
        self._parts = [(handle.offset, handle.dtype.itemsize) for handle in handles]

    def pieces(self, new_buffer: Callable[[int], Tensor]) -> list[tuple[Tensor, int]]:
        """The ranks' stretches of rows, which lie one after the other in host memory."""
        found = []
        tensors = self._whole.all(new_buffer)
        self._whole.expect(self)
        for tensor, (offset, itemsize) in zip(tensors, self._parts, strict=True):
            at = offset
            for stretch in self._rows.view(tensor):
                found.append((stretch.view(-1).view(torch.uint8), at))
                at += stretch.numel() * itemsize
        return found

    def let_go(self) -> None:
        self._whole.is_through(self)
