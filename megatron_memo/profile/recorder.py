"""Records what an iteration asks of memory: every storage that torch's operators make, and its end.

NOTE: how a storage is followed
-------------------------------
* A request is the first sight of a storage among the results of an operator, its end the death of
  the storage. Views and in-place results bring storages that were seen before.
* A storage whose size has changed, by an operator or by hand (`untyped_storage().resize_`), was
  given back and asked for anew.
* Inside a function that a compiler fuses into one kernel, only storages that outlive the call are
  requests (`ops.fused`).
* Autograd adds up gradients in place where it owns the first one alone, but never while a dispatch
  mode watches: then it makes a third tensor. `_Accumulation` tells these additions from others by
  their reference counts and has them done in place again.
* Workspaces inside of kernels are no storages; `workspaces` adds them by formula.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_memo import compat, phases
from megatron_memo.ops import fused
from megatron_memo.ops.workspace import Workspace
from megatron_memo.phases import START, Phase
from megatron_memo.profile.shapes import ShapeCache
from megatron_memo.profile.trace import Enter, Event, Free, Malloc

# Given an operator and its arguments: what the device's kernel needs besides its results.
Workspaces = Callable[[Any, tuple], list[Workspace]]

STREAM = 0  # everything is allocated on the compute stream; see swap.engine


def no_workspaces(func: Any, args: tuple) -> list[Workspace]:
    """For kernels whose inside is not of interest."""
    return []


class Recorder(TorchDispatchMode):
    """Follows storages from when it is entered; see the NOTE above.

    Args:
        device_types: those of the tensors that count, "meta" or "cpu" or both.
        workspaces: requests inside of kernels.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled in a profile, and torch would wrap every call twice over."""
        return False

    def __init__(self, *device_types: str, workspaces: Workspaces = no_workspaces) -> None:
        super().__init__()
        self._device_types = frozenset(device_types)
        self._workspaces = workspaces
        self._shapes = ShapeCache() if "meta" in device_types else None
        self._accumulation = _Accumulation(device_types[0])
        # By the storage's identity, which may come back once its entry is gone.
        self._live: dict[int, _Entry] = {}
        self._names: dict[int, str] = {}  # by identity: an operator's hash is computed in Python
        self._next_id = 0
        self._in_fused: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._recording = False
        self._events: list[Event] = []
        self._held: list[Malloc] = []
        self._phases: dict[Phase, int] = {}

    def __enter__(self) -> Any:
        entered = super().__enter__()
        self._accumulation.learn()
        return entered

    # ---- the window

    def start(self) -> None:
        """The window begins; what is alive now is held."""
        gc.collect()
        gc.disable()  # cycles are found at moments that no plan can know
        self._events, self._phases = [], {START: 0}
        self._held = [
            Malloc(entry.id, entry.size, STREAM, entry.what) for entry in self._live.values()
        ]
        self._recording = True

    def stop(self) -> tuple[list[Phase], list[Event], list[Malloc]]:
        """The window's phases, its events, and what was alive when it began."""
        self._recording = False
        gc.enable()
        return list(self._phases), self._events, self._held

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Notes phases, fused functions and storages resized by hand inside the body."""
        storage: Any = torch.UntypedStorage
        resize = storage.resize_

        @functools.wraps(resize)
        def resize_and_tell(resized: torch.UntypedStorage, size: int) -> Any:
            result = resize(resized, size)
            self._resized_by_hand(resized)
            return result

        storage.resize_ = resize_and_tell
        try:
            with phases.listening(self._enter), fused.listening(self._end_of_fused):
                yield
        finally:
            storage.resize_ = resize

    def _enter(self, phase: Phase) -> None:
        if not self._recording:
            return
        number = self._phases.setdefault(phase, len(self._phases))
        # A phase that nothing happened in need not be told.
        if self._events and isinstance(self._events[-1], Enter):
            self._events.pop()
        self._events.append(Enter(number))

    # ---- storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = self._names.get(id(func))
        if what is None:
            what = self._names[id(func)] = str(func)
        for t in args:
            if isinstance(t, Tensor):
                self._meet(t, what)
            elif isinstance(t, (list, tuple)):
                for item in t:
                    if isinstance(item, Tensor):
                        self._meet(item, what)
        if func is torch.ops.aten.add.Tensor and self._accumulation.is_in_place(args):
            out = args[0].add_(args[1]) if self._shapes is None else args[0]
        elif self._shapes is None:
            out = func(*args, **kwargs)
        else:
            out = self._shapes.call(func, args, kwargs)
        asked = self._workspaces(func, args) if self._recording else []
        if isinstance(out, Tensor):
            self._note(out, what)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, Tensor):
                    self._note(item, what)
                elif isinstance(item, (list, tuple)):
                    for inner in item:
                        if isinstance(inner, Tensor):
                            self._note(inner, what)
        if asked:
            self._use(asked)
        return out

    def _meet(self, t: Tensor, what: str) -> None:
        """An operator's argument; what no operator has made (`torch.tensor`) is first seen here."""
        if t.device.type not in self._device_types or t.layout is not torch.strided:
            return
        storage = t.untyped_storage()
        if storage._cdata in self._live or storage._cdata in self._in_fused:
            return
        size = storage.nbytes()
        if size == 0:
            return
        self._ask(storage, size, f"for {what}")

    def _note(self, t: Tensor, what: str) -> None:
        if t.device.type not in self._device_types or t.layout is not torch.strided:
            return
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        entry = self._live.get(key)
        if entry is not None:
            if entry.size != size:
                self._resized(key, entry, storage, size, what)
            return
        if size == 0:
            return
        if fused.inside():
            if key not in self._in_fused:
                self._in_fused[key] = weakref.ref(storage, partial(self._fused_gone, key)), size
            return
        self._ask(storage, size, what)

    def _ask(self, storage: torch.UntypedStorage, size: int, what: str) -> None:
        entry = self._follow(storage, size, what)
        if self._recording:
            self._events.append(Malloc(entry.id, size, STREAM, what))

    def _follow(self, storage: torch.UntypedStorage, size: int, what: str) -> _Entry:
        key, number = storage._cdata, self._next_id
        self._next_id += 1
        entry = _Entry(number, size, what, weakref.ref(storage, partial(self._gone, key, number)))
        self._live[key] = entry
        return entry

    def _gone(self, key: int, number: int, _ref: Any) -> None:
        entry = self._live.get(key)
        if entry is not None and entry.id == number:
            del self._live[key]
            if self._recording:
                self._events.append(Free(number))

    def _resized(
        self, key: int, entry: _Entry, storage: torch.UntypedStorage, size: int, what: str
    ) -> None:
        del self._live[key]
        if self._recording:
            self._events.append(Free(entry.id))
        if size:
            self._ask(storage, size, what)

    def _resized_by_hand(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type not in self._device_types:
            return
        entry, size = self._live.get(storage._cdata), storage.nbytes()
        if entry is None:
            if size:
                self._ask(storage, size, "resize_")
        elif entry.size != size:
            self._resized(storage._cdata, entry, storage, size, "resize_")

    def _end_of_fused(self, name: str) -> None:
        waiting, self._in_fused = self._in_fused, {}
        for ref, size in waiting.values():
            storage = ref()
            if storage is not None:
                self._ask(storage, size, f"fused:{name}")

    def _fused_gone(self, key: int, _ref: Any) -> None:
        self._in_fused.pop(key, None)

    def _use(self, asked: list[Workspace]) -> None:
        """A kernel's own requests, all given back when it ends."""
        first = self._next_id
        self._next_id += len(asked)
        for number, workspace in enumerate(asked, first):
            what = f"workspace:{workspace.what}"
            self._events.append(Malloc(number, workspace.size, STREAM, what))
        self._events += [Free(number) for number in range(first, self._next_id)]


class _Entry:
    __slots__ = ("id", "ref", "size", "what")

    def __init__(self, number: int, size: int, what: str, ref: weakref.ref[Any]) -> None:
        self.id, self.size, self.what, self.ref = number, size, what, ref


class _Accumulation:
    """Knows autograd's own additions of gradients whose first operand nobody else holds.

    The counts that such an operand shows from inside a dispatch mode depend on torch's version, so
    they are learned from a small graph at the start.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._alone: tuple[int, int, int] | None = None
        self._learning = False

    def learn(self) -> None:
        """Learns the counts; the dispatch mode is on, so that they are as it will see them.

        Raises:
            RuntimeError: torch adds gradients in a way that this program does not know.
        """
        if self._alone is not None:
            return
        x = torch.empty(8, 8, device=self._device_type, requires_grad=True)
        w = torch.empty(8, 8, device=self._device_type)
        self._learning = True
        with torch.enable_grad():
            h = x * 1
            a, b = h @ w, h @ w
            (a + b).sum().backward()
        self._learning = False
        if self._alone is None:
            raise RuntimeError(
                "this version of torch adds gradients in a way that the profile does not know; "
                "requirements.txt names the versions that it does"
            )

    def is_in_place(self, args: tuple) -> bool:
        """Whether autograd, unwatched, would do `add(*args)` in its first operand."""
        if len(args) != 2 or not all(isinstance(t, Tensor) for t in args):
            return False
        if args[0].shape != args[1].shape or not _called_by_engine():
            return False
        first = args[0]
        counts = (
            torch._C._storage_Use_Count(first.untyped_storage()._cdata),
            first._use_count(),
            sys.getrefcount(first),
        )
        if self._learning:
            self._alone = counts
            return True
        return counts == self._alone


# Frames between the engine and us that belong to torch (torch/_compile.py).
_TORCH_FRAMES = ("inner", "_fn", "__torch_dispatch__", "is_in_place")


def _called_by_engine() -> bool:
    """No Python function runs between autograd's engine and the dispatch mode."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _TORCH_FRAMES:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in compat.ENGINE_CALLERS
