"""Which plan a run begins with: the one given, the one an earlier run saved, or none yet."""

from __future__ import annotations

from pathlib import Path

from megatron_memo.plan.plan_file import Plan, PlanError, load_plan
from megatron_memo.profile.fingerprint import differences
from megatron_memo.training.planned import Identity

SUFFIX = ".plan.jsonl"
SAVED_FOLDER = "memo_plan"


def given_plan(path: Path, identity: Identity) -> Plan:
    """The plan for this rank that the user names.

    Args:
        path: a plan, or a folder with plans of which one is this rank's.

    Raises:
        PlanError: not there, damaged, or of another rank, device, layout, model or version; the
            message begins with the flag and says all that differs.
    """
    try:
        plan = _of_rank(path, identity)
    except PlanError as error:
        raise PlanError(f"--memo-plan {error}") from None
    reasons = unsuitable(plan, identity)
    if reasons:
        raise PlanError(
            f"--memo-plan {path}: the plan does not fit this run: {'; '.join(reasons)}. Make one "
            "for these settings with `megatron-memo profile` and `plan`, or give --memo-plan auto."
        )
    return plan


def saved_plan(folder: Path, identity: Identity) -> tuple[Plan | None, str]:
    """The plan that an earlier run left for this rank, and why it is not used if there is one."""
    path = saved_path(folder, identity)
    if not path.exists():
        return None, ""
    try:
        plan = load_plan(path)
    except PlanError as error:
        return None, str(error)
    reasons = unsuitable(plan, identity)
    return (None, f"{path}: {'; '.join(reasons)}") if reasons else (plan, "")


def saved_path(folder: Path, identity: Identity) -> Path:
    """Where a run that saves checkpoints into `folder` keeps this rank's plan."""
    return folder / SAVED_FOLDER / f"rank{identity.rank:05d}{SUFFIX}"


def unsuitable(plan: Plan, identity: Identity) -> list[str]:
    """Why the plan is not of this rank and these settings, in words; empty if it is."""
    reasons = []
    if plan.device != identity.device:
        reasons.append(
            f"it is for the device {plan.device}, here is {identity.device} (`megatron-memo "
            f"profile --device {identity.device}`)"
        )
    if plan.world_size != identity.world_size:
        reasons.append(f"it is for {plan.world_size} ranks, here are {identity.world_size}")
    elif identity.rank not in (plan.rank, *plan.same_ranks):
        ranks = ", ".join(map(str, sorted({plan.rank, *plan.same_ranks})))
        reasons.append(f"it is for rank {ranks}, this is rank {identity.rank}")
    if len(plan.windows) != 1:
        reasons.append(f"it has {len(plan.windows)} windows, training has one")
    for window in plan.windows[:1]:
        reasons += differences(window.fingerprint, identity.fingerprint)
    return reasons


def _of_rank(path: Path, identity: Identity) -> Plan:
    if not path.is_dir():
        return load_plan(path)
    own = f"rank-{identity.rank}{SUFFIX}", f"rank{identity.rank:05d}{SUFFIX}"
    files = sorted(path.glob(f"*{SUFFIX}"), key=lambda file: (file.name not in own, file.name))
    if not files:
        raise PlanError(f"{path}: the folder holds no plan (*{SUFFIX})")
    for file in files:
        plan = load_plan(file)
        if identity.rank in (plan.rank, *plan.same_ranks):
            return plan
    raise PlanError(f"{path}: none of its {len(files)} plans is for rank {identity.rank}")
