"""Storage accounting: the live and peak bytes of what torch operations allocate."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageMeter(TorchDispatchMode):
    """Counts the storages that operations in its scope make, until they die.

    On a machine without CUDA this is what "device memory" means: the bytes of live tensor
    storages. What existed before (parameters, gradient buffers, inputs) is not counted unless an
    operation returns it; what `ignore` names is never counted. Host memory of the swap engine is
    no torch allocation and not seen. The workspace inside a kernel is not seen either.

    Attributes:
        live_bytes: bytes alive now.
        peak_bytes: most bytes alive at once since the meter was entered.
    """

    def __init__(self, ignore: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: dict[int, weakref.ref] = {}
        self._ignored = [t.untyped_storage() for t in ignore or []]
        self._ignored_addresses = {s.data_ptr() for s in self._ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        inputs = {
            t.untyped_storage().data_ptr()
            for t in tree_iter((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), inputs)
        return out

    def _note(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        seen = self._seen.get(key)
        if seen is not None and seen() is not None:
            return
        address = storage.data_ptr()
        # In-place results and views carry a storage that was there before, made in this scope
        # (then it is in `_seen`) or not (then it is not ours to count).
        if address in inputs or address in self._ignored_addresses or storage.nbytes() == 0:
            return
        nbytes = storage.nbytes()
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def gone(_ref: weakref.ref, key: int = key, nbytes: int = nbytes) -> None:
            self.live_bytes -= nbytes
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
