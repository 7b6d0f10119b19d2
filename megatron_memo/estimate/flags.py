"""A training run's command line as what an estimate reads: a job, and what is done about memory."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_memo.arguments import check_memo_words, memo_config_from_args
from megatron_memo.config import MemoConfig
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import (
    FineGrainedOffload,
    FullRecompute,
    Memo,
    Stock,
    Strategy,
)
from megatron_memo.sizes import size_words
from megatron_memo.training.loss_head import LossHead, loss_head

AUTO = "auto"
_RATIO, _HOST_BUDGET = "--memo-swap-ratio", "--memo-host-budget"


@dataclass(frozen=True)
class Run:
    """What the flags say.

    Attributes:
        words: the flags.
        job: what is trained, and its layout.
        strategy: what is done about activations; for memo see `memo_strategy`.
        memo: None where memo is off.
        auto: the swap ratio is to be chosen; the one in `memo` means nothing.
        loss_chunks: as given with --memo-loss-chunks.
    """

    words: tuple[str, ...]
    job: Job
    strategy: Strategy
    memo: MemoConfig | None
    auto: bool
    loss_chunks: str | None


def read_run(words: Sequence[str], world_size: int) -> Run:
    """Megatron's parser on the flags; nothing is set up, and no file that they name is read.

    Args:
        words: Megatron's and memo's flags.
        world_size: GPUs of the run.

    Raises:
        ValueError: a mistake in the flags, an impossible layout, or what an estimate does not know.
    """
    check_memo_words(words)
    plain, auto = _without_auto(words)
    args = _parsed(plain, world_size)
    _check_counts(args)
    job = Job.from_args(args, world_size)
    memo = memo_config_from_args(args)
    _check_composes(args, memo)
    layers = job.layers + (getattr(args, "mtp_num_layers", None) or 0)
    if memo is not None and memo.resident_layers >= layers:
        raise ValueError(
            f"--memo-resident-layers {memo.resident_layers}: all {layers} layers stay on the "
            "device and nothing moves, which training refuses. Give less, such as "
            "--memo-resident-layers 0, or drop --memo-swap-ratio."
        )
    strategy = _strategy(args)
    flag = getattr(args, "memo_loss_chunks", None)
    return Run(tuple(words), job, strategy, memo, auto, flag)


def memo_strategy(job: Job, memo: MemoConfig, loss_chunks: str | None, device_bytes: int) -> Memo:
    """The strategy of memo's settings, its loss head as training would choose it.

    Args:
        job: what is trained.
        memo: settings.
        loss_chunks: "auto", a number, or None.
        device_bytes: memory of the GPU, which "auto" follows.

    Raises:
        ValueError: `loss_chunks` is neither, or more than there are tokens.
    """
    head: LossHead | None = loss_head(
        loss_chunks,
        tokens=job.tokens,
        local_tokens=job.local_tokens // job.micro_batch,
        vocabulary=job.vocabulary // job.tp,
        itemsize=job.element_bytes,
        device_bytes=device_bytes,
    )
    return Memo(
        ratio=memo.swap_ratio,
        chunks=memo.chunks,
        resident=memo.resident_layers,
        loss=None if head is None else head.chunks,
        prefetch=memo.prefetch_depth,
        experts=memo.moe_experts,
    )


def with_flag(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with `flag` set to `value`."""
    return [*without_flag(words, flag), flag, value]


def has_flag(words: Sequence[str], flag: str) -> bool:
    """Whether `flag` is among the words, in either spelling."""
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def host_left_free(words: Sequence[str], host_memory: int) -> int:
    """Bytes of a node's host memory that a run with these flags leaves to others.

    Args:
        words: the run's flags.
        host_memory: of a node.

    Raises:
        ValueError: `--memo-host-budget` is no size, or more than there is.
    """
    from megatron_memo.swap.host_budget import AUTO as ALL_BUT_HEAD_ROOM
    from megatron_memo.swap.host_budget import HEAD_ROOM, given_budget

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_HOST_BUDGET)
    given = parser.parse_known_args(list(words))[0].memo_host_budget
    if given in (None, ALL_BUT_HEAD_ROOM):
        return host_memory // HEAD_ROOM
    budget = given_budget(given)
    if budget > host_memory:
        raise ValueError(
            f"{_HOST_BUDGET} {given}: is more than --host-memory {size_words(host_memory)} of a "
            "node. Give less, or more of --host-memory."
        )
    return host_memory - budget


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """The words without `flag` and the value that follows it."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


def _without_auto(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words with a number for a swap ratio of "auto", and whether it was."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_RATIO)
    given, _ = parser.parse_known_args(list(words))
    if given.memo_swap_ratio != AUTO:
        return list(words), False
    return with_flag(words, _RATIO, "0.5"), True


def _parsed(words: Sequence[str], world_size: int) -> argparse.Namespace:
    import torch

    from megatron_memo import compat, compat_versions, platform

    if not torch.cuda.is_available():
        with contextlib.redirect_stdout(io.StringIO()):
            platform.activate()
    compat_versions.check_version(training=True)
    compat.install_import_hooks()
    from megatron.training.arguments import parse_args

    from megatron_memo.training.command_line import add_arguments

    before, said = sys.argv, io.StringIO()
    environment = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    kept = {name: os.environ.get(name) for name in environment}
    sys.argv = [before[0], *words]
    os.environ.update(environment)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse_args(extra_args_provider=add_arguments)
    except SystemExit:
        errors = [line for line in said.getvalue().splitlines() if ": error: " in line]
        mistake = errors[-1].partition(": error: ")[2] if errors else "Megatron refuses the flags"
        raise ValueError(mistake) from None
    finally:
        sys.argv = before
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_composes(args: argparse.Namespace, memo: MemoConfig | None) -> None:
    from megatron_memo.refusals import check_supported

    if memo is not None:
        check_supported(args, memo)


def _check_counts(args: argparse.Namespace) -> None:
    """Raises ValueError where one count of the flags has to suit another, and does not."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.group_query_attention and heads and groups and heads % groups:
        parts = [k for k in range(1, heads + 1) if heads % k == 0]
        below = max(k for k in parts if k < groups) if groups > 1 else 1
        above = min((k for k in parts if k > groups), default=heads)
        raise ValueError(
            f"--num-query-groups {groups}: does not divide --num-attention-heads {heads}. Use one "
            f"that does, such as {below} or {above}."
        )
    experts, topk = args.num_experts, args.moe_router_topk
    if experts and topk and topk > experts:
        raise ValueError(
            f"--moe-router-topk {topk}: more than the {experts} experts of --num-experts. Lower it."
        )


def _strategy(args: argparse.Namespace) -> Strategy:
    """What Megatron itself does about activations.

    Raises:
        ValueError: a way that is not simulated.
    """
    granularity = getattr(args, "recompute_granularity", None)
    if granularity == "full":
        layers = getattr(args, "recompute_num_layers", None) or 1
        if args.recompute_method != "uniform" or layers != 1:
            raise ValueError(
                f"--recompute-method {args.recompute_method} --recompute-num-layers {layers}: the "
                "estimate knows full recompute of one layer at a time. Give --recompute-method "
                "uniform --recompute-num-layers 1."
            )
        return FullRecompute()
    if granularity is not None:
        raise ValueError(
            f"--recompute-granularity {granularity}: the estimate knows full, or none. Drop it."
        )
    if getattr(args, "fine_grained_activation_offloading", False):
        modules = getattr(args, "offload_modules", None)
        return FineGrainedOffload(tuple(modules)) if modules else FineGrainedOffload()
    return Stock()
