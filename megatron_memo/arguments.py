"""The command line of memo: flags added to Megatron's parser, and the config they give."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_memo import platform
from megatron_memo.config import (
    DEFAULT_RESIDENT_LAYERS,
    PROVISIONAL_RATIO,
    Experts,
    MemoConfig,
    PlanSettings,
    depth_from_text,
)
from megatron_memo.sizes import parse_size

AUTO = "auto"
MODULES = ("auto", "memo", "upstream")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # as argparse knows one from a flag

# Flags that only say how memo works, and so say nothing unless a ratio turns it on. Values are the
# defaults, which is how a given flag is told from one left out.
_NEED_RATIO: dict[str, Any] = {
    "memo_chunks": None,
    "memo_resident_layers": None,
    "memo_prefetch_depth": None,
    "memo_loss_chunks": None,
    "memo_host_budget": None,
    "memo_moe_experts": None,
    "memo_nvme_path": None,
    "memo_nvme_budget": None,
    "memo_link_bandwidth": None,
    "memo_measurements": None,
    "memo_sync": False,
    "memo_poison": False,
}


def add_memo_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the memo group to ``parser`` and return it; an ``extra_args_provider`` of Megatron.

    Numbers are read as text and checked by ``memo_config_from_args``, so that a wrong one is
    answered by a sentence about that flag instead of the usage of six hundred flags.
    """
    group = parser.add_argument_group(
        title="memo",
        description="Long contexts in less device memory: token-wise swap and recompute of "
        "activations. One flag is enough: --memo-swap-ratio auto.",
    )
    group.add_argument(
        "--memo-swap-ratio",
        metavar="auto|R",
        help="Turn memo on. Each layer moves the activations of the first R (0 to 1) of its tokens "
        "to host memory until backward needs them, and recomputes those of the rest. 1 moves "
        "everything (most host memory and traffic), 0 recomputes everything but attention (most "
        "arithmetic). Losses and gradients are the same for every R. 'auto' measures layers and "
        "link in the first three iterations, and goes on with the R that makes a step shortest "
        "within host and device memory; one line says which and why. Without this flag the run is "
        "plain Megatron.",
    )
    group.add_argument(
        "--memo-measurements",
        metavar="FILE",
        help="With --memo-swap-ratio auto: take what an earlier run measured instead of measuring. "
        "A run with --save leaves such a file in its folder, as memo_plan/ratio.json. One of "
        "another model is refused.",
    )
    group.add_argument(
        "--memo-chunks",
        metavar="N",
        help="Work through each layer's tokens in N pieces. More pieces mean a lower memory peak "
        "and smaller matrix products. Left out, memo chooses from the sequence length.",
    )
    group.add_argument(
        "--memo-resident-layers",
        metavar="N",
        help="The last N layers keep their activations on the device, because backward needs them "
        f"at once. The default is {DEFAULT_RESIDENT_LAYERS}, as in the MEMO paper; 0 saves the "
        "most memory.",
    )
    group.add_argument(
        "--memo-host-budget",
        metavar="auto|SIZE",
        help="Host memory of each node that the moved activations of all its ranks may take, "
        "such as 1.5TiB. 'auto', the default, is what the tightest limit leaves (control groups, "
        "Slurm, the machine), less what an offloaded optimizer, checkpoints and data loading "
        "take and some head-room; a log line says which limit it was. A run that needs more is "
        "refused at its start.",
    )
    group.add_argument(
        "--memo-prefetch-depth",
        metavar="auto|N|layers",
        help="How long moved activations stay on the device after they were made, and how early "
        "they come back: N steps, of which a layer has two for each chunk and one for attention. "
        "A small N needs the least memory; a large one leaves copies more time. 'auto', the "
        "default, is one layer's steps, so that attention's time can hide all copies, and fewer "
        "above 1048576 tokens; 'layers' is two whole layers, as in the MEMO paper.",
    )
    group.add_argument(
        "--memo-moe-experts",
        choices=[policy.value for policy in Experts],
        help="What happens to what a mixture of experts (--num-experts) saves for backward, "
        "whatever the ratio, which is for attention and dense layers: experts work on whole "
        "sequences, so that routing and its losses stay those of Megatron. 'swap', the default, "
        "moves it to host memory. 'recompute' moves the experts' inputs only, and runs the experts "
        "again in backward; routing is saved and not repeated. 'keep' leaves it on the device.",
    )
    group.add_argument(
        "--memo-nvme-path",
        metavar="DIR",
        help="Folder on a fast local disk. Moved activations that the host budget cannot hold are "
        "written there and read back in time, in files that have no name and vanish with the "
        "process. Numbers do not change. --memo-swap-ratio auto chooses for host memory alone and "
        "does not count on the disk.",
    )
    group.add_argument(
        "--memo-nvme-budget",
        metavar="SIZE",
        help="Bytes of that disk that all ranks of a node together may take, such as 4TiB. Left "
        "out, it is nearly all that is free. Needs --memo-nvme-path.",
    )
    group.add_argument(
        "--memo-modules",
        choices=MODULES,
        default="auto",
        help="Which norm and core attention the local transformer uses. 'auto' takes memo's where "
        "--memo-swap-ratio is given or Megatron's refuse to run (its plain torch norm under "
        "sequence parallelism), and Megatron's otherwise; a log line says so. 'memo' takes "
        "memo's under Megatron's own layer even without a ratio, which is the baseline to compare "
        "memo with. 'upstream' never replaces anything. Transformer Engine's modules are never "
        "replaced.",
    )
    group.add_argument(
        "--memo-loss-chunks",
        metavar="auto|N",
        help="Compute the loss in N pieces of a sequence, so that the logits of the whole never "
        "exist; backward computes each piece's logits again. Words are looked up in as many "
        "pieces, so that backward never gathers a whole sequence's gradient. 'auto', the default, "
        "does both where logits would take more than a tenth of the device's memory (of "
        "--memo-device-budget, if that is given).",
    )
    group.add_argument(
        "--memo-plan",
        metavar="auto|off|FILE",
        default="off",
        help="Serve activations and other short-lived device memory from one arena at planned "
        "addresses, so that nothing fragments and the device allocator is not asked any more. "
        "'auto' records the third iteration's requests, plans them beside the fourth and uses the "
        "plan from the fifth on; with --save the plan is kept, and a resumed run begins with it. "
        "FILE is a plan of `megatron-memo plan` or a folder with one for each rank; one that was "
        "made for other settings is refused. Numbers do not change. Needs a C++ compiler, once.",
    )
    group.add_argument(
        "--memo-device-budget",
        metavar="SIZE",
        help="Bytes that the plan's arena may have, such as 70GiB. On a machine without a GPU it "
        "is what all tensors together may have: more is an out-of-memory error as on a GPU.",
    )
    group.add_argument(
        "--memo-link-bandwidth",
        metavar="SIZE",
        help="For experiments on a machine without a GPU: copies take at least as long as over a "
        "link of SIZE bytes a second in each direction, such as 200MiB.",
    )
    group.add_argument(
        "--memo-sync",
        action="store_true",
        help="For debugging: wait for every copy at once, so that nothing overlaps. If a problem "
        "goes away with this flag, it is one of ordering.",
    )
    group.add_argument(
        "--memo-poison",
        action="store_true",
        help="For debugging: fill every buffer that is given back with NaN, so that reading one "
        "too late shows up in the loss instead of passing unseen.",
    )
    group.add_argument(
        "--memo-report",
        metavar="FILE",
        help="Write a JSON file when training ends: seconds and exact loss of every iteration, "
        "bytes swapped, versions.",
    )
    group.add_argument(
        "--memo-trace",
        metavar="FILE",
        help="Write what compute and copies did in the run's tenth iteration, when ratio and plan "
        "are there, on rank 0, as a Chrome trace: compute by layer and chunk, copies to the host "
        "and back with bytes and bandwidth. https://ui.perfetto.dev opens it. Works without "
        "--memo-swap-ratio too, to compare with.",
    )
    group.add_argument(
        "--memo-measure-memory",
        metavar="ITER",
        help="Measure the peak of activation memory in iteration ITER, counted from 1. The "
        "measurement slows that iteration down on a machine without a GPU, and the report marks "
        "its time. Needs --memo-report.",
    )
    return parser


class _MemoParser(argparse.ArgumentParser):
    """The memo flags alone, with a mistake as an exception rather than usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}. --help explains the memo flags.")


def check_memo_words(words: Sequence[str]) -> None:
    """Answer a mistyped memo flag by a sentence; Megatron's parser would print its whole usage.

    Args:
        words: the command line, without the program's name.

    Raises:
        ValueError: a word begins like a memo flag and is none, or a memo flag lacks its value or
            has one that it does not take.
    """
    parser = _MemoParser(add_help=False, allow_abbrev=False)
    add_memo_arguments(parser)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith(("--memo-", "--memo_")) and flag not in known:
            nearest = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
            meant = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
            raise ValueError(f"{flag}: there is no such flag. {meant}")
    for word, value in itertools.pairwise(words):
        # argparse takes -1GiB for a flag, and a number for what it is.
        if word in known and re.match(r"-\.?\d", value) and not _NUMBER.fullmatch(value):
            raise ValueError(
                f"{word} {value}: must not be below 0. --help explains the memo flags."
            )
    parser.parse_known_args(list(words))


def memo_config_from_args(args: argparse.Namespace) -> MemoConfig | None:
    """The memo settings on the command line, or None where memo is off.

    Args:
        args: what a parser with ``add_memo_arguments`` returned. Attributes that are missing count
            as left out (a script that does not know memo, Megatron's ``--yaml-cfg``).

    Raises:
        ValueError: a number that is none or out of range, or a memo flag without a ratio.
    """
    ratio: float | None = PROVISIONAL_RATIO
    if not ratio_is_auto(args):
        ratio = _number(args, "memo_swap_ratio", float, f"{AUTO}, or a number from 0 to 1")
        _refuse_measurements(args, ratio)
    chunks = _number(args, "memo_chunks", int, "a whole number, such as 4")
    resident = _number(args, "memo_resident_layers", int, "a whole number, such as 2")
    if ratio is None:
        for name, default in _NEED_RATIO.items():
            value = getattr(args, name, default)
            if value != default:
                given = flag_of(name) if value is True else f"{flag_of(name)} {value}"
                raise ValueError(
                    f"{given}: has no effect without --memo-swap-ratio, which turns memo on. Add "
                    "--memo-swap-ratio (0.5 is a good start), or drop the flag."
                )
        return None
    experts = getattr(args, "memo_moe_experts", None)
    # A checkpoint may bring the experts.
    may_have_experts = getattr(args, "num_experts", None) or getattr(
        args, "use_checkpoint_args", False
    )
    if experts is not None and not may_have_experts:
        raise ValueError(
            f"--memo-moe-experts {experts}: has no effect without --num-experts. Drop the flag."
        )
    return MemoConfig(
        swap_ratio=ratio,
        chunks=chunks,
        resident_layers=DEFAULT_RESIDENT_LAYERS if resident is None else resident,
        sync=bool(getattr(args, "memo_sync", False)),
        poison=bool(getattr(args, "memo_poison", False)),
        prefetch_depth=depth_from_text(getattr(args, "memo_prefetch_depth", None) or "auto"),
        moe_experts=Experts.SWAP if experts is None else Experts(experts),
        link_bandwidth=_link_bandwidth(args),
    )


def ratio_is_auto(args: argparse.Namespace) -> bool:
    """Whether the ratio is to be found by the run itself; the config then has a provisional one."""
    return getattr(args, "memo_swap_ratio", None) == AUTO


def _refuse_measurements(args: argparse.Namespace, ratio: float | None) -> None:
    path = getattr(args, "memo_measurements", None)
    if path is not None and ratio is not None:
        raise ValueError(
            f"--memo-measurements {path}: has no effect with --memo-swap-ratio {ratio:g}, which is "
            "a ratio already. Give --memo-swap-ratio auto, or drop the flag."
        )


def _link_bandwidth(args: argparse.Namespace) -> int | None:
    text = getattr(args, "memo_link_bandwidth", None)
    if text is None:
        return None
    try:
        speed = parse_size(text)
    except ValueError as reason:
        raise ValueError(f"--memo-link-bandwidth {text}: {reason}, of a second.") from None
    if not platform.on_cpu():
        raise ValueError(
            f"--memo-link-bandwidth {text}: slows copies down only on a machine without a GPU, and "
            "here is one. Drop the flag."
        )
    return speed


def plan_settings_from_args(args: argparse.Namespace) -> PlanSettings:
    """What ``--memo-plan`` and ``--memo-device-budget`` say.

    Raises:
        ValueError: the budget is no size, or the plan's file is not there.
    """
    budget = device_budget_from_args(args)
    plan = getattr(args, "memo_plan", "off")
    if plan not in ("auto", "off") and not os.path.exists(plan):
        raise ValueError(
            f"--memo-plan {plan}: there is no such file. Give auto, off, or what `megatron-memo "
            "plan` wrote."
        )
    return PlanSettings(plan, budget)


def device_budget_from_args(args: argparse.Namespace) -> int | None:
    """Bytes of ``--memo-device-budget``; None where it is not given.

    Raises:
        ValueError: it is no size.
    """
    text = getattr(args, "memo_device_budget", None)
    try:
        return None if text is None else parse_size(text)
    except ValueError as reason:
        raise ValueError(f"--memo-device-budget {text}: {reason}.") from None


def measured_iteration(args: argparse.Namespace) -> int | None:
    """The iteration (from 1) whose memory is to be measured, or None.

    Raises:
        ValueError: not a whole number, below 1, or nothing to write the result to.
    """
    iteration = _number(args, "memo_measure_memory", int, "a whole number, such as 3")
    if iteration is None:
        return None
    if iteration < 1:
        raise ValueError(
            f"--memo-measure-memory {iteration}: iterations are counted from 1. Give 1 or more; "
            "2 or more measures the steady state."
        )
    if getattr(args, "memo_report", None) is None:
        raise ValueError(
            f"--memo-measure-memory {iteration}: the result goes into the file that --memo-report "
            "names, and there is none. Add --memo-report FILE."
        )
    return iteration


def flag_of(attribute: str) -> str:
    """``memo_swap_ratio`` -> ``--memo-swap-ratio``."""
    return "--" + attribute.replace("_", "-")


def _number[Kind: (int, float)](
    args: argparse.Namespace, name: str, kind: type[Kind], wanted: str
) -> Kind | None:
    text = getattr(args, name, None)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{flag_of(name)} {text}: must be {wanted}.") from None
