"""``megatron-memo estimate -- FLAGS``: does it fit, how long is a step, what to change."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_memo.exit_status import Exit
from megatron_memo.plan.atomic_file import whole_file
from megatron_memo.plan.cli_parts import check_output, positive
from megatron_memo.sizes import parse_size, size_words

if TYPE_CHECKING:
    from megatron_memo.estimate.answer import Answer
    from megatron_memo.estimate.cost import Costs
    from megatron_memo.estimate.flags import Run
    from megatron_memo.estimate.hardware import Machine

HELP = "Tell whether a training run fits its GPUs, how long a step takes, and what to change."
UNKNOWN_HINT = " (the training run's flags go after --)"

_MODEL = """\
      --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32 \\
      --seq-length 1048576 --max-position-embeddings 1048576 --position-embedding-type rope \\
      --micro-batch-size 1 --global-batch-size 1 --bf16 --use-distributed-optimizer \\
      --tensor-model-parallel-size 8 --sequence-parallel --attention-dropout 0 \\
      --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4"""
_EXAMPLES = f"""\
examples: the 7B model of the MEMO paper at 1M tokens on one node of A800s

  megatron-memo estimate --gpu a800-80g --host-memory 2TiB -- \\
{_MODEL} \\
      --memo-swap-ratio auto

  Over sequence lengths, or over every layout of two nodes:

  megatron-memo estimate --sweep seq-length=64K..4M -- FLAGS
  megatron-memo estimate --nodes 2 --search -- FLAGS

The flags after -- are those of the training run. --memo-swap-ratio auto takes the ratio with the
shortest step that fits. Memory of the run's own way is from a profile of Megatron on tensors
without data (see megatron-memo profile; seconds to half a minute), of the other ways and with
--quick by arithmetic. Step times are simulated from the GPU's datasheet and from efficiencies that
`megatron-memo calibrate` corrects by a run of yours: they are predictions, not measurements.

Exit status: 0, whether it fits or not; 2 after a mistake in the flags; 1 if Megatron failed."""
_TOP = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-memo estimate [options] -- MEGATRON-FLAGS"
    parser.epilog = _EXAMPLES
    add_machine_arguments(parser)
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="efficiencies, of megatron-memo calibrate"
    )
    parser.add_argument(
        "--reserve",
        metavar="SIZE",
        default=None,
        help="bytes of a GPU that tensors cannot have: CUDA, NCCL, fragmentation (default 2GiB)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="memory by arithmetic only: no profile, seconds"
    )
    parser.add_argument(
        "--sweep",
        metavar="seq-length[=LIST]",
        help="estimate all ways at each length of 64K,100000,1M, or of 64K..1M, doubling",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="estimate every tensor, pipeline and context parallel layout of the GPUs, each with "
        "memo's best ratio for several chunk counts, and list the fastest that fit",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all numbers here")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write the simulated iteration for https://ui.perfetto.dev",
    )
    parser.add_argument("flags", nargs="*", metavar="MEGATRON-FLAGS", help=argparse.SUPPRESS)


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """--gpu, --nodes, --gpus-per-node, --host-memory."""
    parser.add_argument("--gpu", metavar="NAME", default="a800-80g", help="default: a800-80g")
    parser.add_argument(
        "--nodes", metavar="N", type=positive, default=1, help="how many (default 1)"
    )
    parser.add_argument("--gpus-per-node", metavar="N", type=positive, default=8, help="default: 8")
    parser.add_argument(
        "--host-memory", metavar="SIZE", default="2TiB", help="of a node (default 2TiB)"
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the arguments describe.

    Raises:
        ValueError: an unknown GPU (the nearest are listed), or a size that is none.
    """
    from megatron_memo.estimate.flags import host_left_free
    from megatron_memo.estimate.hardware import Machine, gpu

    host = _size("--host-memory", args.host_memory)
    return Machine(
        gpu(args.gpu),
        gpus=args.gpus_per_node,
        host_memory=host,
        host_free=host_left_free(args.flags, host),
    )


def run(args: argparse.Namespace) -> int:
    """Estimate as asked; returns the exit status.

    Raises:
        ValueError: a mistake of the user's.
    """
    from megatron_memo.profile.process import ProfileFailed

    check_flags_given(args.flags, "estimate")
    if args.sweep is not None and args.search:
        raise ValueError("--sweep and --search: give one of the two.")
    for path in (args.json, args.trace):
        if path is not None:
            check_output([], path)
    if args.trace is not None and (args.sweep is not None or args.search):
        raise ValueError("--trace: shows one iteration. Drop --sweep or --search.")
    try:
        content = _estimate(args)
    except ProfileFailed as failed:
        print(failed, file=sys.stderr)
        return Exit.NO
    if args.json is not None:
        _write(args.json, content)
    return 0


def check_flags_given(flags: Sequence[str], command: str) -> None:
    """Raises ValueError where nothing follows --."""
    if not flags:
        raise ValueError(
            f"no flags of a training run: put them after --, as in megatron-memo {command} -- "
            "--num-layers 32 ... (--help has a whole example)"
        )


def _estimate(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_memo.estimate.answer import DEFAULT_RESERVE
    from megatron_memo.estimate.cost import Costs
    from megatron_memo.estimate.flags import read_run

    machine = machine_of(args)
    reserve = DEFAULT_RESERVE if args.reserve is None else _size("--reserve", args.reserve)
    run = read_run(args.flags, args.nodes * args.gpus_per_node)
    costs = Costs(run.job, machine, calibration_of(args, run))
    tokens = None if args.sweep is None else _lengths(args.sweep, run)
    heading = _heading(run, machine, args.nodes)
    told: dict[str, Any] = {"job": asdict(run.job), "machine": asdict(machine)}
    told["calibration"] = asdict(costs.efficiency)
    if tokens is None and not args.search:
        return told | _one(args, run, costs, reserve, heading)
    print(heading)
    if tokens is not None:
        return told | {"sweep": _sweep(tokens, costs, reserve)}
    return told | {"search": _search(args, run, costs, reserve)}


def _one(
    args: argparse.Namespace, run: Run, costs: Costs, reserve: int, heading: str
) -> dict[str, Any]:
    from megatron_memo.estimate import table
    from megatron_memo.estimate.answer import answer, plain
    from megatron_memo.estimate.changes import best_changes
    from megatron_memo.estimate.chrome import chrome_trace
    from megatron_memo.estimate.ways import beside, own_strategy

    if run.job.experts is not None and not args.quick:
        raise ValueError(
            f"--num-experts {run.job.experts.count}: how many tokens an expert gets depends on the "
            "data, and a profile has none. Add --quick before --, for memory by arithmetic with "
            "evenly loaded experts."
        )
    strategy = own_strategy(run, costs, reserve)
    quick = answer(costs, strategy, reserve=reserve)
    print(heading)  # nothing that can be a mistake comes after it
    own = quick if args.quick else _profiled(run, costs, quick, reserve)
    ways = beside(own, costs, reserve)
    print(table.side_by_side(ways, own, costs.machine.gpu.memory))
    print("\n".join(table.notes(ways, own, run.job, reserve, costs.machine)))
    changes = best_changes(costs, quick, auto=run.auto, reserve=reserve)
    print("\nWhat would help most:" if changes else "\nNo change that was tried would help.")
    for number, change in enumerate(changes, 1):
        print(f"{number}. {change.what}: {change.gain(quick)}")
    if args.trace is not None:
        _write(args.trace, chrome_trace(own.result))
        print(f"\nthe simulated iteration is in {args.trace}: open it at https://ui.perfetto.dev")
    return {
        "own": own.name,
        "ways": [plain(one) for one in ways],
        "changes": [
            {"what": c.what, "gain": c.gain(quick), "then": plain(c.then)} for c in changes
        ],
    }


def _profiled(run: Run, costs: Costs, quick: Answer, reserve: int) -> Answer:
    from megatron_memo.estimate.answer import answer
    from megatron_memo.estimate.flags import with_flag
    from megatron_memo.estimate.hardware import CPU
    from megatron_memo.estimate.profiled import profiled_peak
    from megatron_memo.estimate.strategies import Memo

    words = list(run.words)
    if run.auto:
        assert isinstance(quick.strategy, Memo)
        words = with_flag(words, "--memo-swap-ratio", f"{quick.strategy.ratio:.6f}")
    peak = profiled_peak(
        words,
        run.job,
        stage=quick.peak.stage,
        device="cpu" if costs.machine.gpu.name == CPU else "cuda",
        device_bytes=costs.machine.gpu.memory,
        tell=lambda at: _progress(f"profile: {at}"),
    )
    _progress("")
    return answer(costs, quick.strategy, reserve=reserve, peak=peak)


def _lengths(text: str, run: Run) -> list[int]:
    """What --sweep asks for, each a length that the layout divides."""
    from megatron_memo.estimate.sweep import lengths

    found = lengths(text, run.job.sequence)
    for tokens in found:
        replace(run.job, sequence=tokens)  # refuses what is not
    return found


def _sweep(lengths: Sequence[int], costs: Costs, reserve: int) -> list[Any]:
    from megatron_memo.estimate import table
    from megatron_memo.estimate.answer import plain
    from megatron_memo.estimate.sweep import sweep

    told, rows, longest = [], [], dict[str, int]()
    for tokens, answers in sweep(costs, lengths, reserve):
        for one in answers:
            kind = one.name.partition(" 0")[0].partition(" 1")[0]
            if one.fits:
                longest[kind] = tokens
            rows.append(
                [
                    table.tokens_words(tokens),
                    table.way_words(one),
                    size_words(one.peak.parts.total),
                    size_words(one.host_bytes) if one.host_bytes else "-",
                    table.seconds_words(one.result.seconds),
                    f"{one.result.mfu_full:.1%}",
                    f"{one.result.mfu_causal:.1%}",
                    "yes" if one.fits else "no",
                ]
            )
        told.append({"tokens": tokens, "ways": [plain(one) for one in answers]})
        _progress(f"{table.tokens_words(tokens)} tokens")
    _progress("")
    head = ["tokens", "", "GPU", "host of a GPU", "step", "MFU full", "MFU causal", "fits"]
    print(table.aligned([head, *rows]))
    for kind, tokens in longest.items():
        print(f"longest of these that fits, {kind}: {table.tokens_words(tokens)}")
    return told


def _search(args: argparse.Namespace, run: Run, costs: Costs, reserve: int) -> list[Any]:
    from tqdm import tqdm

    from megatron_memo.estimate import table
    from megatron_memo.estimate.answer import plain
    from megatron_memo.estimate.sweep import layout_of, layouts, search

    found = []
    for job in tqdm(layouts(run.job, args.gpus_per_node), "layouts", leave=False, disable=None):
        found += search(costs, job, reserve)
    fitting = [one for one in found if one.answer.fits]
    fitting.sort(key=lambda one: one.answer.result.seconds)
    rows = [["", "GPU", "host of a GPU", "step", "tokens/s", "MFU full", "MFU causal"]]
    for one in fitting[:_TOP]:
        result = one.answer.result
        rows.append(
            [
                layout_of(one),
                size_words(one.answer.peak.parts.total),
                size_words(one.answer.host_bytes) if one.answer.host_bytes else "-",
                table.seconds_words(result.seconds),
                f"{result.tokens_per_second:.0f}",
                f"{result.mfu_full:.1%}",
                f"{result.mfu_causal:.1%}",
            ]
        )
    print(f"{len(fitting)} of {len(found)} that were tried fit")
    if fitting:
        print(table.aligned(rows))
    return [
        {"layout": layout_of(one), "job": asdict(one.job), **plain(one.answer)} for one in fitting
    ]


def _heading(run: Run, machine: Machine, nodes: int) -> str:
    from megatron_memo.estimate.table import tokens_words

    job = run.job
    layout = f"tp {job.tp}, pp {job.pp}, cp {job.cp}, dp {job.dp}"
    return (
        f"{tokens_words(job.sequence)} tokens, {job.layers} layers of {job.hidden}; {job.ranks} x "
        f"{machine.gpu.name} on {nodes} node{'s' if nodes > 1 else ''} ({layout}), "
        f"{size_words(machine.host_memory)} of host memory a node\n"
    )


def calibration_of(args: argparse.Namespace, run: Run) -> Any:
    """The given efficiencies, checked against what they were measured on; None for the default."""
    from megatron_memo.estimate.calibrate import check_measured_on
    from megatron_memo.estimate.calibration import read
    from megatron_memo.estimate.hardware import CPU, gpu

    if args.calibration is None:
        if args.gpu == CPU:
            raise ValueError(
                "--gpu cpu: no datasheet tells what a CPU reaches. Measure a run and give "
                "--calibration FILE, of megatron-memo calibrate."
            )
        return None

    efficiencies, measured_on = read(args.calibration)
    check_measured_on(args.calibration, measured_on, run.job, gpu(args.gpu).name)
    return efficiencies


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as reason:
        raise ValueError(f"{flag} {text}: {reason}.") from None


def _progress(words: str) -> None:
    """One line that the next one overwrites, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def _write(path: Path, content: Any) -> None:
    with whole_file(path) as file:
        json.dump(content, file, indent=1)
        file.write("\n")
