"""What a recompute must find as it was: random states and autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron_memo import compat


class Replay:
    """Notes, at construction, the random states and autocast settings of the forward.

    Random states are those that Megatron's own checkpointing restores: torch's CPU and CUDA
    generators and every stream of Megatron's tracker (tensor-parallel dropout).
    """

    def __init__(self, device_type: str):
        self._rng = compat.rng_states()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device_type, "cpu"))
        ]
        self._autocast_caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs its body with gradients on and everything as noted; puts the present back after."""
        with torch.enable_grad(), compat.forked_rng(), ExitStack() as settings:
            compat.set_rng_states(self._rng)
            for kind, dtype, enabled in self._autocast:
                settings.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self._autocast_caches
                    )
                )
            yield
