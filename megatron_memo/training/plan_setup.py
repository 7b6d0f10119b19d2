"""From the flags to ``PlannedSteps``: allocator, identity, and the plan to begin with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_memo import platform
from megatron_memo.config import MemoConfig, PlanSettings
from megatron_memo.training import telling

if TYPE_CHECKING:
    from megatron_memo.training.planned import Log, PlannedSteps, Start


def planned_steps(
    args: argparse.Namespace, memo: MemoConfig | None, settings: PlanSettings, log: Log
) -> PlannedSteps | None:
    """Installs the allocator; None where neither plan nor budget is asked for, or only a budget.

    Args:
        args: validated by Megatron.
        memo: None without a swap ratio.
        settings: what is asked for.
        log: says a line, from one rank.

    Raises:
        ValueError: the allocator can't be built or installed, or a budget limits nothing.
    """
    if not settings.wanted:
        return None
    from megatron_memo.allocator.face import get_allocator

    device = "cpu" if platform.is_active() else "cuda"
    if device == "cuda" and settings.plan == "off":
        raise ValueError(
            f"--memo-device-budget {args.memo_device_budget}: on a GPU it limits the plan's arena, "
            "and there is no plan. Add --memo-plan auto, or drop the flag."
        )
    allocator = get_allocator(device)
    if settings.budget is not None:
        allocator.set_budget(settings.budget)
    if settings.plan == "off":
        return None

    from megatron_memo.training.planned import PlannedSteps

    starting = partial(_start, args, memo, settings, device, log)
    return PlannedSteps(
        allocator,
        starting,
        budget=settings.budget,
        gather=telling.gather,
        log=log,
        write=telling.write,
        interval=args.log_interval,
    )


def _start(
    args: argparse.Namespace,
    memo: MemoConfig | None,
    settings: PlanSettings,
    device: str,
    log: Log,
    chunks: Sequence[Any],
) -> Start:
    """What this rank begins with. Raises PlanError where a given plan is not for it."""
    from megatron_memo import compat
    from megatron_memo.profile.fingerprint import fingerprint
    from megatron_memo.training.auto_setup import settled
    from megatron_memo.training.plan_source import given_plan, saved_path, saved_plan
    from megatron_memo.training.planned import Identity, Start

    found = fingerprint(args, settled(memo, chunks), compat.rank_kind(list(chunks)))
    identity = Identity(device, args.rank, args.world_size, found)
    if settings.plan != "auto":
        return Start(identity, given_plan(Path(settings.plan), identity))
    plan = None
    if args.load is not None:
        plan, why_not = saved_plan(Path(args.load), identity)
        if why_not:
            log(f"the saved memory plan is made anew: {why_not}")
    save = None if args.save is None else saved_path(Path(args.save), identity)
    return Start(identity, plan, save)
