"""One token-wise piece of a layer on one chunk, under saved-tensor hooks.

NOTE: why hooks and not a nested backward. The whole layer is one plain autograd graph; hooks only
decide where a saved tensor lies in the meantime. No backward runs inside a backward, so each
parameter's gradient hook fires once and Megatron's DDP (which counts them) stays right.

NOTE: what a hook may rely on. A saved tensor is recognised by the address of its storage, and only
while a reference held here keeps that storage alive: a freed address comes back for another tensor.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_memo.layer.chunks import Fate
from megatron_memo.layer.recompute_watch import recomputing
from megatron_memo.layer.replay import Replay
from megatron_memo.layer.stand_in import standing_in
from megatron_memo.swap.context import Handle, LayerContext, check_unchanged


class Base(NamedTuple):
    """A tensor that comes back by other means: rows of the layer input or attention output.

    Attributes:
        values: the detached tensor as forward sees it; saved views of its storage are not moved.
        fetch: gives it again in backward, same shape and strides.
    """

    values: Tensor
    fetch: Callable[[], Tensor]


class _View(NamedTuple):
    """A view, relative to the first element of the tensor it was taken from."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements

    @classmethod
    def of(cls, view: Tensor, root: Tensor) -> "_View":
        offset = int(view.storage_offset() - root.storage_offset())
        return cls(view.size(), view.stride(), offset)

    def on(self, root: Tensor) -> Tensor:
        return root.as_strided(self.size, self.stride, root.storage_offset() + self.offset)


class _Fixed:
    """A tensor that stays where it is. Under hooks autograd does not watch for in-place changes."""

    def __init__(self, t: Tensor):
        self._t, self._version = t.detach(), t._version

    def unchanged(self) -> Tensor:
        check_unchanged(self._t, self._version)
        return self._t


class _OfBase(NamedTuple):
    number: int
    view: _View


class _Recomputed(NamedTuple):
    number: int


class _LastInput(NamedTuple):
    view: _View


class Segment:
    """Runs `function` on a chunk and disposes of what autograd saves, as the chunk's fate says.

    Args:
        function: maps the chunk's tensors to a tuple of tensors; called again on recompute.
        bases: the chunk's tensors in backward, in the order of `function`'s arguments.
        fate: see `Fate`.
        context: where swapped tensors go; needed for SWAP.
        fixed: addresses of storages that are there anyway (parameters, RoPE tables).
        min_swap_bytes: smaller storages stay.
        last_gemm: (owner, name) of the last linear layer of `function`. Nothing but its input is
            needed of what comes out of it, so recompute does not run it again.
        keep_outputs: recompute keeps the outputs for `take_outputs`.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *,
        bases: list[Base],
        fate: Fate,
        context: LayerContext | None,
        fixed: frozenset[int],
        min_swap_bytes: int,
        last_gemm: tuple[nn.Module, str] | None = None,
        keep_outputs: bool = False,
    ):
        self._function = function
        self._fetches = [base.fetch for base in bases]
        self._base_values = [base.values for base in bases]  # forward only
        self._fate = fate
        self._context = context
        self._fixed = fixed
        self._min_swap_bytes = min_swap_bytes
        self._last_gemm = last_gemm
        self._keep_outputs = keep_outputs
        # Recompute's side.
        self._replay: Replay | None = None
        self._saved_count = 0
        self._recomputed: list[Tensor | weakref.ref[Tensor] | None] | None = None
        self._outputs: tuple[Tensor, ...] | None = None
        # The last GEMM's side.
        self._skip_last_gemm = last_gemm is not None
        self._last_input: Tensor | None = None
        self._last_input_uses = 0
        self._last_output: tuple[torch.Size, torch.dtype, Tensor | None] | None = None
        self._in_last_gemm = False

    # ---- forward

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The segment's outputs."""
        if self._fate is Fate.KEEP or not torch.is_grad_enabled():
            return self._function(*inputs)
        if self._fate is Fate.SWAP:
            assert self._context is not None
            with saved_tensors_hooks(self._pack_swapped, self._unpack_swapped):
                outputs = self._function(*inputs)
            self._end_forward()
            return outputs
        self._replay = Replay(inputs[0].device.type)
        with (
            saved_tensors_hooks(self._pack_dropped, self._unpack_dropped),
            self._watched_last_gemm(),
        ):
            outputs = self._function(*inputs)
        self._end_forward()
        return outputs

    def _end_forward(self) -> None:
        # From here on the bases come from their context; holding these would pin device memory.
        self._base_values = []
        self._last_input = None

    # ---- SWAP

    def _pack_swapped(self, t: Tensor) -> Any:
        address = t.untyped_storage().data_ptr()
        if address in self._fixed:
            return _Fixed(t)
        for index, values in enumerate(self._base_values):
            if address == values.untyped_storage().data_ptr() and t.dtype == values.dtype:
                return _OfBase(index, _View.of(t, values))
        if t.untyped_storage().nbytes() < self._min_swap_bytes:
            return t.detach()
        assert self._context is not None
        return self._context.put(t)

    def _unpack_swapped(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Fixed):
            return packed.unchanged()
        if isinstance(packed, _OfBase):
            return packed.view.on(self._fetches[packed.number]())
        assert isinstance(packed, Handle) and self._context is not None
        return self._context.get(packed)

    # ---- RECOMPUTE

    def _pack_dropped(self, t: Tensor) -> Any:
        if t.untyped_storage().data_ptr() in self._fixed:
            return _Fixed(t)
        if self._in_last_gemm:
            last = self._last_input
            assert last is not None
            if _same_storage(t, last) and t.dtype == last.dtype:
                self._last_input_uses += 1
                return _LastInput(_View.of(t, last))
            self._skip_last_gemm = False  # it saves something of its own making
        self._saved_count += 1
        return _Recomputed(self._saved_count - 1)

    def _unpack_dropped(self, packed: Any) -> Tensor:
        if isinstance(packed, _Fixed):
            return packed.unchanged()
        self.recompute()
        if isinstance(packed, _LastInput):
            if self._last_input is None:
                raise _walked_twice()
            t = packed.view.on(self._last_input)
            self._last_input_uses -= 1
            if self._last_input_uses == 0:
                self._last_input = None
            return t
        assert self._recomputed is not None
        entry = self._recomputed[packed.number]
        if isinstance(entry, weakref.ref):
            entry = entry()
        if entry is None:
            raise _walked_twice()
        # Whoever asked holds it now; kept here only as long as that.
        self._recomputed[packed.number] = weakref.ref(entry)
        return entry

    def recompute(self) -> None:
        """Runs the segment again from its bases, once, and keeps what autograd would have saved."""
        if self._recomputed is not None:
            return
        assert self._replay is not None
        kept: list[Tensor | weakref.ref[Tensor] | None] = []

        def pack(t: Tensor) -> None:
            address = t.untyped_storage().data_ptr()
            if address in self._fixed:
                return
            if self._in_last_gemm:
                last = self._last_input
                assert last is not None
                if _same_storage(t, last) and t.dtype == last.dtype:
                    return
            kept.append(t.detach())

        with (
            recomputing(),
            self._replay.restored(),
            saved_tensors_hooks(pack, _no_backward_in_recompute),
        ):
            inputs = [fetch().detach().requires_grad_() for fetch in self._fetches]
            with self._stubbed_last_gemm() if self._skip_last_gemm else self._watched_last_gemm():
                outputs = self._function(*inputs)
        if len(kept) != self._saved_count:
            raise RuntimeError(
                f"recompute saved {len(kept)} tensors where forward saved {self._saved_count}: the "
                "layer does not compute the same twice (data-dependent control flow, or a "
                "different autocast or fp8 state). Train this layer with --memo-swap-ratio 1."
            )
        self._recomputed = kept
        if self._keep_outputs:
            self._outputs = tuple(t.detach() for t in outputs)
        if self._last_input_uses == 0:
            self._last_input = None

    def take_outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the recompute, once."""
        self.recompute()
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise _walked_twice()
        return outputs

    # ---- the last GEMM

    def _watched_last_gemm(self) -> AbstractContextManager[None]:
        """Lets the last GEMM run and notes what it saves and the shape of what it returns."""
        if self._last_gemm is None:
            return nullcontext()
        owner, name = self._last_gemm
        real = owner._modules[name]
        assert real is not None

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._last_input, self._in_last_gemm = x.detach(), True
            try:
                output, bias = real(x, *args, **kwargs)
            finally:
                self._in_last_gemm = False
            self._last_output = (output.shape, output.dtype, bias)
            return output, bias

        return standing_in(owner, **{name: run})

    def _stubbed_last_gemm(self) -> AbstractContextManager[None]:
        """Keeps the last GEMM's input and returns memory of the right shape without computing it.

        What follows (bias, dropout, residual) saves at most a dropout mask, which depends on the
        random state and the shape only. NaN under --memo-poison proves it.
        """
        assert self._last_gemm is not None and self._last_output is not None
        owner, name = self._last_gemm
        shape, dtype, bias = self._last_output

        def keep_input(x: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            self._last_input = x.detach()
            output = torch.empty(shape, dtype=dtype, device=x.device)
            assert self._context is not None
            self._context.engine.poison(output.view(-1).view(torch.uint8))
            return output.requires_grad_(), bias  # or dropout would not save its mask

        return standing_in(owner, **{name: keep_input})


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _walked_twice() -> RuntimeError:
    return RuntimeError(
        "an activation that memo recomputed was asked for a second time. Backward through a memo "
        "layer can run only once, even with retain_graph."
    )


def _no_backward_in_recompute(_packed: Any) -> Tensor:
    raise RuntimeError("memo: backward was asked for inside a recompute")
