"""``megatron-memo plot KIND``: pictures of a plan, or of what an estimate says of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_memo.estimate.cli import add_machine_arguments

if TYPE_CHECKING:
    from megatron_memo.plan.plan_file import Plan
    from megatron_memo.plot.figure import Figure
    from megatron_memo.profile.trace import Trace

HELP = "Draw a memory plan, or the time and memory that a run is estimated to take."
UNKNOWN_HINT = " (the training run's flags go after --)"

_EXAMPLES = """\
examples:
  megatron-memo plot layout plans/rank-0.plan.jsonl traces/rank-0.trace.jsonl.gz -o layout.html
  megatron-memo plot memory plans/rank-0.plan.jsonl -o memory.png --theme dark
  megatron-memo plot curve --gpu h100-80g -o curve.svg -- MEGATRON-FLAGS

The suffix of -o decides: .png and .svg are drawn by matplotlib; .html is one
page that works without a network, with zoom, hover, and a light and a dark
theme. megatron-memo plot KIND --help
says what each kind shows and takes.

Exit status: 0 written; 2 a mistake in the command line or in a file."""
_THEMES = ("light", "dark")
_PAGE = ".html"

_LAYOUT = "where in the arena each block of a plan lies, and when"
_MEMORY = (
    "memory over an iteration: alive, the plan's arena, what PyTorch would reserve (simulated)"
)
_STREAMS = "what compute, copies and communication do in a simulated iteration"
_PARETO = "step time against device and host memory, over swap ratios, chunks and resident layers"
_CURVE = "keep, recompute or offload: step time and device memory over sequence lengths"
_ALL = "one page of all of these: of a plan, of an estimate, or of both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `plot`: a parser for each kind."""
    parser.epilog = _EXAMPLES
    parser.set_defaults(flags=[])
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, says in (("layout", _LAYOUT), ("memory", _MEMORY)):
        kind = kinds.add_parser(name, help=says, description=_sentence(says), allow_abbrev=False)
        _add_plan(kind)
        _add_output(kind)
    for name, says in (("streams", _STREAMS), ("pareto", _PARETO), ("curve", _CURVE)):
        kind = kinds.add_parser(name, help=says, description=_sentence(says), allow_abbrev=False)
        kind.usage = f"megatron-memo plot {name} -o FILE [options] -- MEGATRON-FLAGS"
        _add_estimate(kind)
        if name == "curve":
            _add_lengths(kind)
        _add_output(kind)
    page = kinds.add_parser("all", help=_ALL, description=_sentence(_ALL), allow_abbrev=False)
    page.usage = "megatron-memo plot all [PLAN [TRACE]] -o FILE.html [options] [-- MEGATRON-FLAGS]"
    _add_plan(page, optional=True)
    _add_estimate(page)
    _add_lengths(page)
    _add_output(page, formats=_PAGE)
    of_machine = ("gpu", "nodes", "gpus_per_node", "host_memory")
    of_estimate = (*of_machine, "calibration", "reserve", "lengths")
    page.set_defaults(untouched={name: page.get_default(name) for name in of_estimate})


def _sentence(says: str) -> str:
    return f"{says[0].upper()}{says[1:]}."


def _add_plan(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "plan",
        metavar="PLAN",
        type=Path,
        nargs="?" if optional else None,
        help="of `megatron-memo plan`, or of a run with --memo-plan auto and --save",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        nargs="?",
        help="that the plan was made of: hovers then name the operator of each block",
    )
    parser.add_argument(
        "--window",
        metavar="N",
        type=int,
        help="which of the plan's windows, counted from 0 (default: the trace's, or the one that "
        "needs most of the arena)",
    )


def _add_estimate(parser: argparse.ArgumentParser) -> None:
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


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        metavar="LIST",
        help="tokens of the curve: 64K,100000,1M, or 64K..1M, doubling (default: from an eighth to "
        "eight times of the run's)",
    )


def _add_output(parser: argparse.ArgumentParser, *, formats: str = ".png, .svg or .html") -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help=f"where to write: {formats}",
    )
    parser.add_argument(
        "--theme",
        choices=_THEMES,
        help="ground of a .png or .svg (default light); an .html follows the reader's system "
        "unless this says otherwise, and has a switch",
    )


def run(args: argparse.Namespace) -> int:
    """Makes the figures, writes the file and says so; returns the exit status.

    Raises:
        ValueError: a mistake of the user's.
    """
    from megatron_memo.plan.cli_parts import check_output
    from megatron_memo.plot.static import FORMATS, draw

    sources = [path for path in (_path(args, "plan"), _path(args, "trace")) if path is not None]
    check_output(sources, args.output)
    suffix = args.output.suffix
    allowed = (_PAGE,) if args.kind == "all" else (*FORMATS, _PAGE)
    if suffix not in allowed:
        raise ValueError(f"{args.output}: -o takes a name that ends in {' or '.join(allowed)}")
    figures = _figures(args)
    try:
        if suffix == _PAGE:
            _write_page(args, figures)
        else:
            draw(figures[0], args.output, args.theme or _THEMES[0])
    except OSError as error:
        raise ValueError(f"{args.output}: {error.strerror or error}") from error
    for figure in figures:
        print("\n".join((f"{figure.title}:", *(f"  {note}" for note in figure.notes))))
    print(f"written to {args.output}")
    return 0


def _write_page(args: argparse.Namespace, figures: Sequence[Figure]) -> None:
    from megatron_memo.plan.atomic_file import whole_file
    from megatron_memo.plot.page import page

    title = figures[0].title if len(figures) == 1 else "Megatron-MEMO: plan and estimate"
    with whole_file(args.output) as file:
        file.write(page(title, figures, theme=args.theme))


def _figures(args: argparse.Namespace) -> list[Figure]:
    plan, estimate = _path(args, "plan"), bool(args.flags)
    if args.kind == "all" and plan is None and not estimate:
        raise ValueError("plot all: give a PLAN, the flags of a training run after --, or both")
    if args.kind == "all":
        _check_effect(args)
    found = [] if plan is None else _of_plan(args, plan)
    if args.kind in ("layout", "memory"):
        if estimate:
            raise ValueError(
                f"plot {args.kind}: takes a plan, and no flags of a training run (after --). Drop "
                "them, or draw everything with plot all."
            )
        return found
    if estimate or args.kind != "all":
        found += _of_run(args)
    return found


def _check_effect(args: argparse.Namespace) -> None:
    """Refuses an option of what is not drawn."""
    if args.plan is None and args.window is not None:
        raise ValueError(f"--window {args.window}: is of a plan, and none is given. Add one.")
    for name, default in args.untouched.items():
        value = getattr(args, name)
        if not args.flags and value != default:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: is of an estimate, and no flags of a "
                "training run are given. Add them after --, or drop it."
            )


def _of_plan(args: argparse.Namespace, path: Path) -> list[Figure]:
    from megatron_memo.plot.layout import layout
    from megatron_memo.plot.memory import memory

    plan, trace, window = _plan(args, path)
    found = []
    if args.kind in ("layout", "all"):
        found.append(layout(plan, trace, window))
    if args.kind in ("memory", "all"):
        found.append(memory(plan, window))
    return found


def _plan(args: argparse.Namespace, path: Path) -> tuple[Plan, Trace | None, int | None]:
    """The plan, its trace if one is given, and the window that is meant."""
    from megatron_memo.plan.plan_file import PlanError, digest_of, load_plan
    from megatron_memo.plan.verify_plan import verify_against
    from megatron_memo.profile.trace import read_trace

    plan = load_plan(path)
    if args.trace is None:
        return plan, None, args.window
    trace = read_trace(args.trace)
    try:
        source = verify_against(plan, trace, digest_of(args.trace))
    except PlanError as error:
        raise PlanError(f"{args.trace}: is not the trace of {path}: {error}") from None
    of_trace = [window.source for window in plan.windows].index(source)
    if args.window not in (None, of_trace):
        raise ValueError(
            f"--window {args.window}: {args.trace} is of window {of_trace}. Give that trace or "
            "that window."
        )
    return plan, trace, of_trace


def _of_run(args: argparse.Namespace) -> list[Figure]:
    from megatron_memo.estimate.answer import DEFAULT_RESERVE
    from megatron_memo.estimate.cli import calibration_of, check_flags_given, machine_of
    from megatron_memo.estimate.cost import Costs
    from megatron_memo.estimate.flags import read_run
    from megatron_memo.estimate.sweep import lengths
    from megatron_memo.estimate.timeline import simulate
    from megatron_memo.estimate.ways import own_strategy
    from megatron_memo.plot.streams import streams
    from megatron_memo.plot.tradeoff import curve, pareto
    from megatron_memo.plot.words import job_words
    from megatron_memo.sizes import parse_size

    check_flags_given(args.flags, f"plot {args.kind}")
    machine = machine_of(args)
    reserve = DEFAULT_RESERVE
    if args.reserve is not None:
        try:
            reserve = parse_size(args.reserve)
        except ValueError as reason:
            raise ValueError(f"--reserve {args.reserve}: {reason}.") from None
    run = read_run(args.flags, args.nodes * args.gpus_per_node)
    costs = Costs(run.job, machine, calibration_of(args, run))
    found = []
    if args.kind in ("streams", "all"):
        result = simulate(costs, own_strategy(run, costs, reserve))
        found.append(streams(result, job_words(costs)))
    if args.kind in ("pareto", "all"):
        found.append(pareto(costs, reserve))
    if args.kind in ("curve", "all"):
        words = "seq-length" if args.lengths is None else f"seq-length={args.lengths}"
        try:
            tokens = lengths(words, run.job.sequence)
        except ValueError as mistake:
            told = str(mistake).replace("--sweep seq-length=", "--lengths ")
            raise ValueError(told) from None
        found.append(curve(costs, sorted(set(tokens)), reserve))
    return found


def _path(args: argparse.Namespace, name: str) -> Path | None:
    return getattr(args, name, None)
