"""What has to change inside Megatron itself, applied right after the module is imported."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch

from megatron_memo.compat import install_import_hooks
from megatron_memo.platform.post_import import when_imported


def install() -> None:
    """Register every change of this file."""
    # Two faults of upstream that any machine without its fused kernels meets.
    install_import_hooks()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_the_fork_warning)
    when_imported("megatron.core.transformer.moe.token_dispatcher", splits_become_numbers)


def splits_become_numbers(token_dispatcher: ModuleType) -> None:
    """Give the all-to-all of experts its split sizes as numbers where they are on the CPU already.

    Touches ``maybe_move_tensor_to_cpu`` as ``megatron.core.transformer.moe.token_dispatcher`` has
    it (0.19), which makes a numpy array of what it moves and leaves a tensor of the CPU a tensor,
    that ``all_to_all_single`` does not take. Can go when upstream converts both.
    """
    module: Any = token_dispatcher
    move = module.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
        result = move(tensor, as_numpy=as_numpy, **options)
        return result.numpy() if as_numpy and torch.is_tensor(result) else result

    module.maybe_move_tensor_to_cpu = moved


def _not_the_fork_warning(record: logging.LogRecord) -> bool:
    """Drop the tracker's warning that a fork used the CPU generator: here it is meant to.

    Can go when the tracker compares generators instead of assuming two of them.
    """
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
