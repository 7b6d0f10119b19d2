"""The launcher: Megatron's own ``pretrain`` with memo's flags.

Order matters: the CPU platform before any import of Megatron; the checks before anything is
written or allocated; training after that. Modules that import Megatron are imported late for it.
"""

from __future__ import annotations

import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

_PROGRAM_START = time.time()

import torch  # noqa: E402  (its import is part of the start-up time that Megatron reports)

from megatron_memo import compat, compat_versions, platform  # noqa: E402
from megatron_memo.arguments import (  # noqa: E402
    check_memo_words,
    measured_iteration,
    plan_settings_from_args,
)
from megatron_memo.config import MemoConfig  # noqa: E402
from megatron_memo.training.command_line import (  # noqa: E402
    ARGS_DEFAULTS,
    add_arguments,
    check_before_start,
    check_validated,
    imply,
    log,
    model_config,
    rank,
    said,
)
from megatron_memo.training.cpu_defaults import follow_cpu  # noqa: E402
from megatron_memo.training.modules import ModuleChoice  # noqa: E402
from megatron_memo.training.plan_setup import planned_steps  # noqa: E402
from megatron_memo.training.user_error import exit_with  # noqa: E402

if TYPE_CHECKING:
    from megatron_memo.training.auto_ratio import AutoRatio
    from megatron_memo.training.planned import PlannedSteps
    from megatron_memo.training.report import Recorder
    from megatron_memo.training.run_page import RunPage
    from megatron_memo.training.run_trace import RunTrace
    from megatron_memo.training.traffic import Traffic


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says.

    Args:
        argv: arguments without the program's name; None takes the process's own. Megatron reads
            ``sys.argv`` again by itself, so a given list replaces it.

    Raises:
        SystemExit: status 2 after a mistake of the user's, which one rank explains; otherwise
            as Megatron ends.
    """
    entered = time.time()
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    if rank() != 0:
        # Every rank would give the same warnings.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        check_memo_words(sys.argv[1:])
    except ValueError as mistake:
        exit_with(str(mistake))
    if not torch.cuda.is_available():
        platform.activate()
    try:
        compat_versions.check_version(training=True)
    except ValueError as mistake:
        exit_with(str(mistake))
    compat.install_import_hooks()

    from megatron.training import set_startup_timestamps
    from megatron.training.arguments import parse_args

    raw = parse_args(extra_args_provider=add_arguments)
    if platform.is_active():
        imply(follow_cpu(raw), "no CUDA here")
    try:
        check_before_start(raw)
    except ValueError as mistake:
        exit_with(str(mistake))

    from megatron_memo.training.auto_setup import auto_ratio

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=entered)
    args = compat_versions.parse_and_validate_args(add_arguments, dict(ARGS_DEFAULTS))
    try:
        memo, modules, room = check_validated(args)
        auto = auto_ratio(args, memo, log)
        planned = planned_steps(args, memo, plan_settings_from_args(args), log)
    except ValueError as mistake:
        exit_with(str(mistake))
    _pretrain(args, memo, modules, room, planned, auto)


def _pretrain(
    args: Namespace,
    memo: MemoConfig | None,
    modules: ModuleChoice,
    room: str | None,
    planned: PlannedSteps | None,
    auto: AutoRatio | None,
) -> None:
    """Hand over to upstream's ``pretrain``; ``args`` are validated and set globally.

    Args:
        args: Megatron's.
        memo: None where memo is off.
        modules: whose norm and attention.
        room: what the host has for moved activations, for the log.
        planned: memory plans, if wanted.
        auto: finds the ratio, if it is to be found.
    """
    from megatron_memo.plan.plan_file import PlanError
    from megatron_memo.training import modelopt
    from megatron_memo.training.auto_ratio import NoRatio
    from megatron_memo.training.datasets import train_valid_test_datasets_provider
    from megatron_memo.training.gpt import embedding_ranks, forward_step
    from megatron_memo.training.ranges import nvtx_ranges
    from megatron_memo.training.report import Recorder
    from megatron_memo.training.run_page_parts import run_page
    from megatron_memo.training.start_line import start_line
    from megatron_memo.training.traffic import NothingSwapped

    modelopt.enable(args)
    config = model_config(args, memo, modules)
    if modules.why:
        log(f"norm and core attention of the layers are memo's ({modules.why})")
    if memo is not None and args.recompute_granularity == "selective":
        log(
            "--recompute-granularity selective changes nothing: memo's layers keep no "
            "attention scores that recomputation would spare"
        )

    listening: Any = nullcontext()
    if planned is not None:
        from megatron_memo.profile.markers import forward_backward

        if auto is None:
            compat.wrap_train_step(planned.step, forward_backward, first=planned.begin)
        else:
            compat.wrap_train_step(auto.before(planned), forward_backward)
        listening = planned.listening()
    if auto is not None:
        compat.wrap_train_step(auto.step, _as_is, first=auto.begin)
    page = run_page(args, memo, planned, auto, said)
    trace = _trace(args, planned, auto)
    if trace is not None:
        compat.wrap_train_step(trace.step, _as_is, first=trace.begin)
    if memo is not None:
        traffic = _traffic(args, page)
        compat.wrap_train_step(traffic.step, _as_is, first=traffic.begin)
        ranges = nvtx_ranges(args)
        if ranges is not None:
            compat.wrap_train_step(ranges.step, _as_is)
    if page is not None:
        compat.wrap_train_step(page.step, _as_is)
    recorder = None
    if getattr(args, "memo_report", None) is not None:
        recorder = Recorder(args.memo_report, memo, measured_iteration(args), planned, auto)
        compat.wrap_train_step(recorder.step, recorder.forward_backward)
    if memo is not None:
        # Last, so first: it is said before anything else is done or said.
        start = start_line(args, memo, room, log)
        compat.wrap_train_step(_as_is, _as_is, first=start.begin)
    try:
        with listening:
            compat_versions.pretrain(
                args,
                config,
                train_valid_test_datasets_provider,
                forward_step,
                store=None,
                get_embedding_ranks=embedding_ranks,
            )
    except (PlanError, NothingSwapped, NoRatio) as refusal:
        exit_with(str(refusal))
    except SystemExit as end:
        # How Megatron ends early when asked to (--exit-interval, a signal): as good an end.
        if not end.code:
            _write_reports(recorder, page, trace)
        raise
    _write_reports(recorder, page, trace)


def _as_is(_iteration: int, run: Callable[[], Any]) -> Any:
    return run()


def _write_reports(recorder: Recorder | None, page: RunPage | None, trace: RunTrace | None) -> None:
    if recorder is not None:
        recorder.write()
    if page is not None:
        page.write()
    if trace is not None:
        trace.finish()


def _trace(
    args: Namespace, planned: PlannedSteps | None, auto: AutoRatio | None
) -> RunTrace | None:
    """What `--memo-trace` asks of this rank."""
    if getattr(args, "memo_trace", None) is None or args.rank != 0:
        return None
    from megatron_memo.profile import markers
    from megatron_memo.training.layer_times import CudaClock, HostClock
    from megatron_memo.training.run_trace import RunTrace

    return RunTrace(
        Path(args.memo_trace),
        HostClock() if platform.is_active() else CudaClock(),
        mark=markers.mark_model if planned is None else None,
        ready=lambda: auto is None or auto.ratio is not None,
        rank=args.rank,
        log=log,
    )


def _traffic(args: Namespace, page: RunPage | None) -> Traffic:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_memo.swap.engine import get_engine
    from megatron_memo.training import telling
    from megatron_memo.training.forecast import forecast
    from megatron_memo.training.traffic import Traffic

    def write(iteration: int, scalars: Mapping[str, float]) -> None:
        telling.write(iteration, scalars)
        if page is not None:
            page.scalars(iteration, scalars)

    return Traffic(
        lambda: get_engine().stats(),
        clock=time.perf_counter,
        gather=telling.gather,
        log=log,
        write=write,
        time=telling.time,
        foresee=lambda layers: forecast(args, layers, get_num_microbatches()),
        interval=args.log_interval,
    )
