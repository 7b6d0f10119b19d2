"""How much host memory a rank's activations may take, and whether what a run needs fits in it.

NOTE: what the automatic budget is
----------------------------------
The tightest limit of the node (see `host_limits`) leaves so much to all processes. A rank gets an
equal share of it, less what Megatron itself will take there: the state of an optimizer that lives
on the host, the copy that a checkpoint is written from, the processes that load data; less
head-room for everything that nobody declares.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_memo import compat, platform
from megatron_memo.arguments import memo_config_from_args
from megatron_memo.config import MemoConfig
from megatron_memo.layer.footprint import host_bytes
from megatron_memo.layer.in_flight import Held, most_held
from megatron_memo.layer.shape import LayerShape, layers_with_experts
from megatron_memo.platform import stand_in
from megatron_memo.sizes import parse_size, size_words
from megatron_memo.swap.host_limits import local_ranks, tightest

AUTO = "auto"
# Allowances, not measurements: head-room is a twentieth of a rank's share, at least a GiB, but
# never more than a quarter; a process that loads data maps its files and holds a few batches.
HEAD_ROOM, _LEAST_HEAD_ROOM, _MOST_HEAD_ROOM = 20, 1 << 30, 4
_LOADER_BYTES = 256 << 20
# Bytes a parameter: fp32 copy, fp32 gradient and both moments of an Adam on the host; of a
# checkpoint, the fp32 copy and both moments.
_OPTIMIZER_BYTES, _CHECKPOINT_BYTES = 16, 12


@dataclass(frozen=True)
class HostBudget:
    """What one rank's activations may take.

    Attributes:
        bytes: of this rank.
        origin: where the number comes from, for people.
        node_bytes: what the tightest limit leaves to this rank, whatever was asked for; None where
            that is another machine's affair (a profile).
    """

    bytes: int
    origin: str
    node_bytes: int | None = None


def host_budget(
    args: argparse.Namespace, *, root: Path = Path("/"), env: Mapping[str, str] = os.environ
) -> HostBudget:
    """The budget that `--memo-host-budget` asks for.

    Args:
        args: Megatron's, validated.
        root: where the file system begins.
        env: the process's environment.

    Raises:
        ValueError: the flag's value is no size.
        OSError: the machine does not tell what it has.
    """
    ranks = local_ranks(env)
    limit = tightest(root, env)
    share, among = limit.free // ranks, _among(ranks)
    text = getattr(args, "memo_host_budget", None)
    if text not in (None, AUTO):
        nbytes = given_budget(text) // ranks
        return HostBudget(nbytes, f"--memo-host-budget {text}{among}", share)
    taken = {name: nbytes for name, nbytes in declared(args).items() if nbytes}
    taken["head-room"] = min(max(share // HEAD_ROOM, _LEAST_HEAD_ROOM), share // _MOST_HEAD_ROOM)
    less = ", ".join(f"{size_words(nbytes)} {name}" for name, nbytes in taken.items())
    origin = f"{size_words(limit.free)} free under {limit.origin}{among}, less {less}"
    return HostBudget(max(share - sum(taken.values()), 0), origin, share)


def declared(args: argparse.Namespace) -> dict[str, int]:
    """Host bytes of one rank that Megatron's own settings will take, by what for."""
    found = {}
    if getattr(args, "optimizer_cpu_offload", False):
        fraction = getattr(args, "optimizer_offload_fraction", 1.0)
        each = _OPTIMIZER_BYTES * fraction / _optimizer_ranks(args)
        found["for the optimizer's state on the host"] = round(_parameters(args) * each)
    if getattr(args, "save", None) and getattr(args, "async_save", False):
        each = args.params_dtype.itemsize + _CHECKPOINT_BYTES / _optimizer_ranks(args)
        found["for the copy that a checkpoint is written from"] = round(_parameters(args) * each)
    workers = getattr(args, "num_workers", None) or 0
    found["for loading data"] = workers * _LOADER_BYTES
    return found


def host_need(args: argparse.Namespace, ratio: float) -> int:
    """Host bytes that one rank's activations take at most, on the stage that holds most.

    Args:
        args: Megatron's, validated.
        ratio: instead of `--memo-swap-ratio`.
    """
    memo = memo_config_from_args(args)
    assert memo is not None, "asked where memo is off"
    return _need(args, dataclasses.replace(memo, swap_ratio=ratio))


def check_fits(
    args: argparse.Namespace, memo: MemoConfig, budget: HostBudget, *, on_disk: int = 0
) -> None:
    """Refuses a run that needs more host memory than it may have.

    Args:
        args: Megatron's, validated.
        memo: the ratio, chunks and resident layers that will be used.
        budget: of one rank.
        on_disk: bytes that files may hold as well.

    Raises:
        ValueError: the bill, the limit and its origin, what to change.
    """
    given = getattr(args, "memo_host_budget", None)
    if budget.node_bytes is not None and budget.bytes > budget.node_bytes:
        raise ValueError(
            f"--memo-host-budget {given}: this node leaves {size_words(budget.node_bytes)} to each "
            f"rank and the flag gives it {size_words(budget.bytes)}. Give auto, or less."
        )
    need = _need(args, memo)
    if need <= budget.bytes + on_disk:
        return
    raise ValueError(
        f"--memo-swap-ratio {memo.swap_ratio:g}: needs {size_words(need)} of host memory on a rank "
        f"({bill(args, memo)}), and there are {size_words(budget.bytes)} ({budget.origin})"
        + (f" and {size_words(on_disk)} on disk" if on_disk > 0 else "")
        + f". {_remedy(args, memo, budget.bytes + on_disk)}"
    )


def bill(args: argparse.Namespace, memo: MemoConfig) -> str:
    """What host memory is needed for, as in "1.4 GiB a layer, 30 layers"."""
    kinds = _layer_bytes(args, memo)
    held = most_held(args, memo.resident_layers, lambda layer: _of_layer(kinds, layer))
    each = " or ".join(size_words(nbytes) for nbytes in sorted(set(kinds))) or "nothing"
    layers = f"{held.layers} layer{'s' if held.layers != 1 else ''}"
    even = ", if the router sends as many tokens to each expert" if _uneven(args) else ""
    return f"{each} a layer, {layers}{_stage(args, held)}{_in_flight(held)}{even}"


def _stage(args: argparse.Namespace, held: Held) -> str:
    return f" of pipeline stage {held.stage}" if args.pipeline_model_parallel_size > 1 else ""


def _in_flight(held: Held) -> str:
    if not held.layers or held.passes == held.layers:
        return ""
    return f", {held.passes / held.layers:.3g} micro-batches in flight"


def _remedy(args: argparse.Namespace, memo: MemoConfig, available: int) -> str:
    others = "raise --memo-resident-layers, run fewer ranks a node, or spill to --memo-nvme-path"
    if _need(args, dataclasses.replace(memo, swap_ratio=0.0)) > available:
        return f"Even --memo-swap-ratio 0 does not fit: {others}, or split the model further."
    fitting = max(
        ratio / 100
        for ratio in range(100)
        if _need(args, dataclasses.replace(memo, swap_ratio=ratio / 100)) <= available
    )
    return f"Lower --memo-swap-ratio to {fitting:g}, {others}."


def _need(args: argparse.Namespace, memo: MemoConfig) -> int:
    kinds = _layer_bytes(args, memo)
    return most_held(args, memo.resident_layers, lambda layer: _of_layer(kinds, layer)).weight


def _layer_bytes(args: argparse.Namespace, memo: MemoConfig) -> list[int]:
    """Of each layer, in order."""
    on_cuda = not platform.is_active() or stand_in.on_meta()
    which = layers_with_experts(args)
    of_kind = {
        experts: host_bytes(LayerShape.from_args(args, on_cuda=on_cuda, experts=experts), memo)
        for experts in set(which)
    }
    return [of_kind[experts] for experts in which]


def _of_layer(kinds: list[int], layer: int) -> int:
    """Layers of multi-token prediction come after all others and are as the last one."""
    return kinds[min(layer, len(kinds)) - 1]


def _uneven(args: argparse.Namespace) -> bool:
    """Which tokens a rank's experts get is for the router to say."""
    return bool(getattr(args, "num_experts", None)) and (
        (getattr(args, "expert_model_parallel_size", None) or 1) > 1
    )


def _parameters(args: argparse.Namespace) -> int:
    return compat.parameters_of_fullest_rank(args)


def _optimizer_ranks(args: argparse.Namespace) -> int:
    """Ranks that share one optimizer state."""
    return args.data_parallel_size if getattr(args, "use_distributed_optimizer", False) else 1


def given_budget(text: str) -> int:
    """Bytes of a node that `--memo-host-budget` gives as a size.

    Raises:
        ValueError: it is none.
    """
    try:
        return parse_size(text)
    except ValueError as reason:
        raise ValueError(f"--memo-host-budget {text}: {reason}, or {AUTO}.") from None


def _among(ranks: int) -> str:
    return f", shared by {ranks} ranks" if ranks > 1 else ""
