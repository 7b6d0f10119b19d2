"""Batches for a profile: the shapes of Megatron's, and nothing in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_memo.platform import stand_in


class Batches:
    """Endless micro-batches, as ``--dataloader-type external`` takes them.

    Args:
        args: Megatron's, validated.
        on_host: a loader would have them in host memory, from where they are copied to the device;
            otherwise they are made on the device itself.
    """

    def __init__(self, args: Any, on_host: bool) -> None:
        self._batch, self._tokens = args.micro_batch_size, args.seq_length
        self._with_mask = args.create_attention_mask_in_dataloader
        self._on_host = on_host

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        b, s = self._batch, self._tokens
        batch = {name: self._made(torch.int64, b, s) for name in ("tokens", "labels")}
        batch["loss_mask"] = self._made(torch.float32, b, s)
        batch["position_ids"] = self._made(torch.int64, b, s)
        if self._with_mask:
            batch["attention_mask"] = self._made(torch.bool, b, 1, s, s)
        return batch

    def _made(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if self._on_host:
            # One element for all: its copy on the device has the full size.
            return torch.ones((), dtype=dtype).expand(shape)
        return torch.ones(shape, dtype=dtype, device=stand_in.device())


def provider(*, on_host: bool) -> Any:
    """A datasets provider for ``pretrain``: training batches, and none to evaluate on."""

    def provide(_samples: Any, vp_stage: int | None = None) -> tuple[Batches, None, None]:
        from megatron.training import get_args

        return Batches(get_args(), on_host), None, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide
