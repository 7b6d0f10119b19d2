"""What has to change inside Megatron itself, applied right after the module is imported."""

from __future__ import annotations

import logging

from megatron_memo.compat import install_import_hooks


def install() -> None:
    """Register every change of this file."""
    # Two faults of upstream that any machine without its fused kernels meets.
    install_import_hooks()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_the_fork_warning)


def _not_the_fork_warning(record: logging.LogRecord) -> bool:
    """Drop the tracker's warning that a fork used the CPU generator: here it is meant to.

    Can go when the tracker compares generators instead of assuming two of them.
    """
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
