"""``megatron-memo calibrate REPORT -- FLAGS``: estimates that follow a run of yours."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from megatron_memo.estimate.cli import add_machine_arguments, check_flags_given, machine_of
from megatron_memo.plan.cli_parts import check_output

HELP = "Correct the estimate's efficiencies by one measured run."
UNKNOWN_HINT = " (the training run's flags go after --)"
_EXAMPLE = """\
examples: measure a short run, then estimate a long one

  torchrun --nproc-per-node 8 pretrain_gpt_memo.py FLAGS --seq-length 65536 --train-iters 6 \\
      --memo-report report.json
  megatron-memo calibrate report.json -o a800.json --gpu a800-80g -- FLAGS --seq-length 65536
  megatron-memo estimate --gpu a800-80g --calibration a800.json -- FLAGS --seq-length 1048576

The flags after -- are those of the measured run; a report of another one is refused. All that
computes is scaled by one factor, so that the simulated step takes as long as the measured one; if
the run swapped and its report tells how long compute stood still for copies, so are the links to
the host. Measure iterations as long as you can afford: what a short sequence spends on the host's
own work is taken for slow kernels.

Exit status: 0, or 2 after a mistake."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-memo calibrate REPORT [options] -- MEGATRON-FLAGS"
    parser.epilog = _EXAMPLE
    parser.add_argument("report", metavar="REPORT", type=Path, help="file of --memo-report")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("calibration.json"),
        help="where the efficiencies go (default: calibration.json)",
    )
    add_machine_arguments(parser)
    parser.add_argument("flags", nargs="*", metavar="MEGATRON-FLAGS", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the file, say what changed.

    Raises:
        ValueError: a mistake of the user's; the report is of another run.
    """
    from megatron_memo.estimate import calibrate
    from megatron_memo.estimate.answer import DEFAULT_RESERVE
    from megatron_memo.estimate.calibration import Calibration, write
    from megatron_memo.estimate.cost import Costs
    from megatron_memo.estimate.flags import read_run
    from megatron_memo.estimate.timeline import simulate
    from megatron_memo.estimate.ways import own_strategy

    check_flags_given(args.flags, "calibrate REPORT")
    check_output([args.report], args.output)
    machine = machine_of(args)
    measured = calibrate.read_report(args.report)
    calibrate.check_device(args.report, measured, machine.gpu.name)
    found = read_run(args.flags, args.nodes * args.gpus_per_node)
    if found.auto:
        raise ValueError(
            "--memo-swap-ratio auto: give the ratio that the measured run had; its report has it "
            "under memo, swap_ratio."
        )
    found = calibrate.same_run(args.report, measured, found)
    costs = Costs(found.job, machine)
    strategy = own_strategy(found, costs, DEFAULT_RESERVE)
    before = simulate(costs, strategy).seconds
    efficiency = calibrate.calibrated(costs, strategy, measured)
    after = simulate(Costs(found.job, machine, efficiency), strategy).seconds
    measured_on = {"gpu": machine.gpu.name, "device": measured.device, "job": asdict(found.job)}
    write(args.output, efficiency, measured_on | {"seconds": measured.seconds})
    print(
        f"measured {measured.seconds:.4g} s an iteration; estimated {before:.4g} s before and "
        f"{after:.4g} s now"
    )
    for field in fields(Calibration):
        old, new = getattr(costs.efficiency, field.name), getattr(efficiency, field.name)
        if old != new and field.name != "source":
            print(f"  {field.name}: {old:.4g} -> {new:.4g} (x{new / old:.3g})")
    print(f"written to {args.output}")
    return 0
