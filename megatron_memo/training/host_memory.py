"""Whether the activations that a run moves have room, asked and told before it starts."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

from megatron_memo import platform
from megatron_memo.arguments import ratio_is_auto
from megatron_memo.config import HostSettings, MemoConfig
from megatron_memo.platform import stand_in
from megatron_memo.sizes import size_words
from megatron_memo.swap.disk import staging_bytes
from megatron_memo.swap.disk_budget import DiskBudget, disk_budget
from megatron_memo.swap.host_budget import HostBudget, bill, check_fits, host_budget, host_need


def with_host_memory(
    args: Namespace, memo: MemoConfig | None
) -> tuple[MemoConfig | None, str | None]:
    """The settings with what this rank may take of the host, and how much that is and why.

    A profile moves nothing, and is often made on another machine: it asks for nothing.

    Args:
        args: Megatron's, validated.
        memo: None where memo is off.

    Raises:
        ValueError: the run needs more than there is.
    """
    if memo is None or (platform.is_active() and stand_in.on_meta()):
        return memo, None
    try:
        budget = host_budget(args)
    except OSError as error:
        raise ValueError(
            f"--memo-host-budget auto: this machine does not tell its memory ({error}). Give a "
            "size."
        ) from None
    disk = disk_budget(args)
    staging = staging_bytes(budget.bytes) if disk else 0
    check_fits(args, memo, budget, on_disk=disk.bytes - staging if disk else 0)
    need = host_need(args, memo.swap_ratio)
    least = " at least" if ratio_is_auto(args) else ""
    spill = max(need - (budget.bytes - staging), 0) if disk else 0
    told = (
        f"host memory: {size_words(need)}{least} needed on a rank ({bill(args, memo)}), "
        f"{size_words(budget.bytes)} to be had ({budget.origin})"
        + (f", {_on_disk(disk, spill)}" if disk else "")
    )
    return dataclasses.replace(memo, host=_settings(budget, disk, need, spill)), told


def _settings(
    budget: HostBudget, disk: DiskBudget | None, need: int = 0, spill: int = 0
) -> HostSettings:
    return HostSettings(
        budget=budget.bytes,
        nvme_path=disk.folder if disk else None,
        nvme_budget=disk.bytes if disk else None,
        need=need,
        spill=spill,
    )


def _on_disk(disk: DiskBudget, spill: int) -> str:
    if not spill:
        return f"nothing has to go to {disk.folder}"
    return f"{size_words(spill)} of it go to {disk.folder}, written and read {disk.access}"
