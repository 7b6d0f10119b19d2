"""From the flags to `AutoRatio`: what is known already, the clock, the program's limits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_memo import platform
from megatron_memo.arguments import ratio_is_auto
from megatron_memo.config import MemoConfig
from megatron_memo.layer.depth import Steps, prefetch_steps
from megatron_memo.layer.in_flight import most_held
from megatron_memo.plan.ratio import Depth, NoRoom, Problem, solve
from megatron_memo.plan.ratio.cost import Decision, cost
from megatron_memo.plan.ratio.schedule import both_share, passes
from megatron_memo.swap.host_budget import AUTO, host_budget, host_need
from megatron_memo.training.auto_ratio import WEIGHED, AutoRatio, Known
from megatron_memo.training.measurements import (
    FILE_NAME,
    Measured,
    Record,
    machine,
    read_record,
    unsuitable,
    write_record,
)

# Tensors are aligned in host memory, which the counted bytes do not show; what a step allocates
# besides buffers differs a little from step to step.
_OF_HOST, _OF_DEVICE = 0.99, 0.95
_NOT_HERE = ("memo swap_ratio", "memo host", "loss chunks")


def auto_ratio(
    args: argparse.Namespace, memo: MemoConfig | None, log: Callable[[str], None]
) -> AutoRatio | None:
    """None where the ratio is given.

    Args:
        args: validated by Megatron.
        memo: None without a swap ratio.
        log: says a line, from one rank.

    Raises:
        ValueError: the run ends before it has measured, no layer swaps, or a file of measurements
            does not suit.
    """
    if memo is None or not ratio_is_auto(args):
        return None
    if args.memo_measurements is None and args.train_iters and args.train_iters <= WEIGHED:
        raise ValueError(
            f"--memo-swap-ratio auto: measures in the first {WEIGHED} iterations, and "
            f"--train-iters is {args.train_iters}. Give a ratio, --memo-measurements FILE, or more "
            "iterations."
        )
    layers = args.num_layers + (getattr(args, "mtp_num_layers", None) or 0)
    if memo.resident_layers >= layers:
        raise ValueError(
            f"--memo-resident-layers {memo.resident_layers}: all {layers} layers stay on the "
            "device, so nothing moves and --memo-swap-ratio auto has nothing to choose. Give less, "
            "such as --memo-resident-layers 0, or drop the ratio."
        )
    if args.memo_measurements is not None:
        _given(args, memo)  # refused before anything starts
    from megatron_memo.swap.engine import get_engine
    from megatron_memo.training import telling
    from megatron_memo.training.layer_times import CudaClock, HostClock, LayerWatch
    from megatron_memo.training.link_probe import link_of_run

    def stats() -> dict[str, Any]:
        return get_engine().stats()

    def waited() -> float:
        now = stats()
        return (now["exposed_d2h_s"] or 0.0) + (now["exposed_h2d_s"] or 0.0)

    host = host_budget(args).bytes
    return AutoRatio(
        known=partial(_known, args, memo, host, log),
        watch=LayerWatch(HostClock() if platform.is_active() else CudaClock(), waited),
        stats=stats,
        probe=link_of_run,
        solve=lambda measured: solve(problem(args, memo, measured, host)),
        predict=lambda measured, ratio: _step(problem(args, memo, measured, host), ratio),
        fits=lambda ratio: host_need(args, ratio) <= host,
        device_room=_device_room,
        gather=telling.gather,
        release=lambda: get_engine().host.give_up_idle(),
        save=partial(_save, args, memo, log),
        log=log,
    )


def problem(args: argparse.Namespace, memo: MemoConfig, measured: Measured, host: int) -> Problem:
    """The program of one rank.

    Args:
        args: validated by Megatron.
        memo: resident layers.
        measured: of the rank.
        host: bytes of host memory that it may take.
    """
    held, swapping = most_held(args, memo.resident_layers), measured.layers - measured.resident
    in_flight = held.passes / held.layers if held.layers else 0.0
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None)
    return measured.problem(
        host=int(host * _OF_HOST),
        held=held.passes,  # of the fullest stage: all take one ratio
        passes=passes(args.pipeline_model_parallel_size, measured.micro_batches, virtual),
        both_share=both_share(swapping, in_flight),
        depths=(_depth(args, memo, measured.chunks),),
    )


def _depth(args: argparse.Namespace, memo: MemoConfig, chunks: int) -> Depth:
    """How much the layers have in flight, as `--memo-prefetch-depth` says."""
    steps = Steps(chunks)
    return Depth(prefetch_steps(memo, steps, args.seq_length // (args.context_parallel_size or 1)))


def ratio_without_run(args: argparse.Namespace) -> float:
    """The ratio that a run with these flags would take, from its file of measurements.

    The host memory of this machine says nothing of the one that trains: with no size in
    `--memo-host-budget` it is the ratio that the measured run took.

    Args:
        args: validated by Megatron; `--memo-swap-ratio` is auto.

    Raises:
        ValueError: no such file is given, it does not suit, or nothing fits.
    """
    from megatron_memo.arguments import memo_config_from_args

    memo = memo_config_from_args(args)
    assert memo is not None and ratio_is_auto(args)
    if args.memo_measurements is None:
        raise ValueError(
            "--memo-swap-ratio auto: measures a training run, and this is none. Give a ratio, or "
            "--memo-measurements FILE with what a run has measured (memo_plan/ratio.json in its "
            "--save folder)."
        )
    record = _given(args, memo)
    if getattr(args, "memo_host_budget", None) in (None, AUTO):
        return record.ratio
    host = host_budget(args).bytes
    found = [
        solve(problem(args, memo, measured, host))
        for measured in record.ranks
        if measured is not None
    ]
    if not found:
        raise ValueError(f"--memo-measurements {args.memo_measurements}: no rank has layers")
    return min(choice.ratio for choice in found)


def settled(memo: MemoConfig | None, chunks: Sequence[Any]) -> MemoConfig | None:
    """The settings with the ratio that the model's layers have by now."""
    from megatron_memo.layer.transformer_layer import MemoTransformerLayer

    if memo is None:
        return None
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MemoTransformerLayer):
                return dataclasses.replace(memo, swap_ratio=module.memo.swap_ratio)
    return memo


def _step(of: Problem, ratio: float) -> float:
    """Seconds of a step at a ratio that fits."""
    return cost(of, Decision(round(ratio * of.rows), 0.0, of.depths[0])).step


# ---- files


def _fingerprint(args: argparse.Namespace, memo: MemoConfig) -> dict[str, Any]:
    from megatron_memo.profile.fingerprint import fingerprint

    found = fingerprint(args, memo, {})
    found = {name: value for name, value in found.items() if name not in _NOT_HERE}
    if memo.link_bandwidth is not None:
        found["memo link_bandwidth"] = memo.link_bandwidth
    return found


def _given(args: argparse.Namespace, memo: MemoConfig) -> Record:
    path = args.memo_measurements
    try:
        record = read_record(Path(path))
    except ValueError as fault:
        raise ValueError(
            f"--memo-measurements {fault}. Give a file that a run with --memo-swap-ratio auto and "
            "--save has left, or drop the flag to measure."
        ) from None
    reasons = unsuitable(record, _fingerprint(args, memo), args.world_size)
    if reasons:
        raise ValueError(
            f"--memo-measurements {path}: they are of another run: {'; '.join(reasons)}. Give a "
            "file of this model and layout, or drop the flag to measure."
        )
    return record


def _known(
    args: argparse.Namespace, memo: MemoConfig, host: int, log: Callable[[str], None]
) -> Known | None:
    """Measurements that were given, or that an earlier run saved for this model and machine."""
    if args.memo_measurements is not None:
        record = _given(args, memo)
        return Known(record.ranks[args.rank], None, f"from {args.memo_measurements}")
    if args.load is None:
        return None
    path = _saved_in(args.load)
    if not path.exists():
        return None
    try:
        record = read_record(path)
    except ValueError as fault:
        log(f"the swap ratio is measured anew: {fault}")
        return None
    reasons = unsuitable(record, _fingerprint(args, memo), args.world_size)
    if record.machine != machine():
        reasons.append(f"it is of {record.machine}, here is {machine()}")
    measured = None if reasons else record.ranks[args.rank]
    if measured is not None and not _fits(problem(args, memo, measured, host), record.ratio):
        reasons.append(f"its ratio {record.ratio:g} does not fit into today's memory")
    if reasons:
        log(f"the swap ratio is measured anew: {path}: {'; '.join(reasons)}")
        return None
    return Known(measured, record.ratio, f"as an earlier run chose it ({path})")


def _fits(of: Problem, ratio: float) -> bool:
    """Whether a ratio of an earlier run has room today."""
    try:
        solve(of)
    except NoRoom:
        return False
    found = cost(of, Decision(round(ratio * of.rows), 0.0, of.depths[0]))
    return found.host <= of.host and (of.device is None or found.device <= of.device)


def _save(
    args: argparse.Namespace,
    memo: MemoConfig,
    log: Callable[[str], None],
    ranks: Sequence[Measured | None],
    ratio: float,
) -> None:
    if args.save is None or args.rank != 0:
        return
    try:
        record = Record(_fingerprint(args, memo), machine(), ratio, ranks)
        write_record(_saved_in(args.save), record)
    except OSError as error:
        log(f"the measurements of the swap ratio are not kept: {error.strerror or error}")


def _saved_in(folder: str) -> Path:
    from megatron_memo.training.plan_source import SAVED_FOLDER

    return Path(folder) / SAVED_FOLDER / FILE_NAME


# ---- the machine


def _device_room(always: int) -> int | None:
    """Bytes that a GPU has left after the measured steps, whose buffers are free then."""
    if platform.is_active():
        return None
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()  # others' and CUDA's own
    room = total - taken - torch.cuda.max_memory_allocated()
    return max(int(room * _OF_DEVICE), 0) + 2 * always
