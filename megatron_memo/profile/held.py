"""What a rank holds between iterations, by what it is for: weights, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"


class HeldParts:
    """Measures the three; begins to watch which optimizers step when it is made.

    Args:
        device_types: of the tensors that count.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self._device_types = frozenset(device_types)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._watch = register_optimizer_step_pre_hook(self._note)

    def bytes_of(self, chunks: Iterable[nn.Module]) -> dict[str, int]:
        """Bytes of each part's storages, each counted once.

        Call it after a step: optimizers that have not stepped yet are not known.

        Args:
            chunks: the rank's model chunks, wrapped by Megatron's DDP.
        """
        seen: set[int] = set()
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        return {
            WEIGHTS: self._sum(parameters, seen),
            GRADIENTS: self._sum(_gradients(parameters), seen),
            OPTIMIZER: self._sum(self._states(), seen),
        }

    def end(self) -> None:
        """Stops watching."""
        self._watch.remove()
        self._optimizers.clear()

    def _note(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _states(self) -> Iterator[Any]:
        """Master weights, where they are not the model's own, and moments."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]
            yield from tree_iter(list(optimizer.state.values()))

    def _sum(self, tensors: Iterable[Any], seen: set[int]) -> int:
        total = 0
        for t in tensors:
            if not isinstance(t, Tensor) or t.device.type not in self._device_types:
                continue
            storage = t.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Any]:
    """Megatron's fp32 or 16-bit buffers that gradients are added up in; else autograd's own."""
    for parameter in parameters:
        yield getattr(parameter, "main_grad", None)
        yield parameter.grad
