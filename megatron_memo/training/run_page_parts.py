"""What the page of a run shows: its settings, its course, its memory, and what memo said."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_memo import platform
from megatron_memo.config import MemoConfig
from megatron_memo.plot.figure import Axis, Figure, Line, Panel, Unit
from megatron_memo.plot.page import Drawn, Part, Table, Words, drawn
from megatron_memo.plot.palette import BLUE, GREEN, ORANGE, PINK, Colour
from megatron_memo.sizes import size_words
from megatron_memo.training.history import Entry

if TYPE_CHECKING:
    from megatron_memo.plan.plan_file import Plan
    from megatron_memo.training.auto_ratio import AutoRatio
    from megatron_memo.training.planned import PlannedSteps
    from megatron_memo.training.run_page import RunPage

Scalars = Mapping[int, Mapping[str, float]]
_LAST_LINES = 200  # of what memo said


def run_page(
    args: argparse.Namespace,
    memo: MemoConfig | None,
    planned: PlannedSteps | None,
    auto: AutoRatio | None,
    said: Callable[[], Sequence[str]],
) -> RunPage | None:
    """The page of this run; None on ranks that do not write it, or where nothing is saved.

    Args:
        args: Megatron's, validated.
        memo: None without a swap ratio.
        planned: None without a memory plan.
        auto: None where the ratio is given.
        said: memo's log lines so far.
    """
    from megatron_memo.training import telling
    from megatron_memo.training.plan_source import SAVED_FOLDER
    from megatron_memo.training.run_page import FILE_NAME, RunPage

    wanted = memo is not None or planned is not None
    if args.save is None or not wanted or args.rank != args.world_size - 1:
        return None
    parts = RunParts(args, memo, planned, auto, said)
    return RunPage(
        Path(args.save) / SAVED_FOLDER / FILE_NAME,
        interval=args.save_interval,
        parts=parts,
        say=telling.say,
        link=partial(telling.link, "report"),
    )


class RunParts:
    """Called with the run's course, gives the parts of the page. Arguments: see `run_page`."""

    def __init__(
        self,
        args: argparse.Namespace,
        memo: MemoConfig | None,
        planned: PlannedSteps | None,
        auto: AutoRatio | None,
        said: Callable[[], Sequence[str]],
    ) -> None:
        self._args, self._memo, self._said = args, memo, said
        self._planned, self._auto = planned, auto
        self._layout: tuple[Plan, Drawn] | None = None

    def __call__(self, entries: Sequence[Entry], scalars: Scalars) -> list[Part]:
        found: list[Part] = [Table("The run", self._settings(entries))]
        if entries:
            found.append(course(entries, scalars))
        if self._memo is not None:
            found.append(Table("Host memory of one rank", self._host(scalars)))
        if self._planned is not None:
            found += self._plan(self._planned)
        lines = list(self._said())
        if lines:
            found.append(Words("What memo said in the log", lines[-_LAST_LINES:]))
        return found

    def _settings(self, entries: Sequence[Entry]) -> list[tuple[str, str]]:
        import torch

        from megatron_memo.training.report import versions

        args = self._args
        device = "CPU" if platform.is_active() else torch.cuda.get_device_name()
        sizes = (
            f"{args.num_layers} layers of {args.hidden_size}, {args.seq_length:,} tokens, "
            f"micro-batch {args.micro_batch_size}, global batch {args.global_batch_size}"
        )
        parallel = (
            f"tensor {args.tensor_model_parallel_size}, pipeline "
            f"{args.pipeline_model_parallel_size}, context {args.context_parallel_size}, data "
            f"{args.data_parallel_size}"
        )
        rows = [
            ("model", sizes),
            ("ranks", f"{args.world_size} ({parallel})"),
            ("device", device),
            ("versions", ", ".join(f"{name} {value}" for name, value in versions().items())),
        ]
        if self._memo is not None:
            rows += self._memo_settings(self._memo)
        if entries:
            rows.append(("seconds an iteration", _seconds(entries)))
            losses = [entry for entry in entries if entry.loss is not None]
            if losses:
                rows.append(("loss", f"{losses[-1].loss:.6g} at iteration {losses[-1].last}"))
        if not platform.is_active():
            most = torch.cuda.max_memory_allocated()
            of = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            rows.append(("device memory", f"{size_words(most)} at most, of {size_words(of)}"))
        return rows

    def _memo_settings(self, memo: MemoConfig) -> list[tuple[str, str]]:
        from megatron_memo.layer.chunks import describe, layer_tokens

        args, ratio = self._args, memo.swap_ratio
        chosen = ""
        if self._auto is not None:
            if self._auto.ratio is None:
                return [("swap ratio", "auto: not chosen yet")]
            ratio, chosen = self._auto.ratio, "chosen by auto; "
        settings = dataclasses.replace(memo, swap_ratio=ratio)
        ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
        layers = args.num_layers + (args.mtp_num_layers or 0)
        cp = args.context_parallel_size
        what = describe(settings, layer_tokens(args), ranks, layers, cp)
        return [
            ("memo", chosen + what),
            ("prefetch depth", f"{memo.prefetch_depth}"),
        ]

    def _host(self, scalars: Scalars) -> list[tuple[str, str]]:
        assert self._memo is not None
        host = self._memo.host
        ratio = None if self._auto is None else self._auto.ratio
        rows = []
        if host.need:
            from megatron_memo.swap.host_budget import host_need

            need = host.need if ratio is None else host_need(self._args, ratio)
            rows.append(("needed, by the bill", size_words(need)))
        if host.budget is not None:
            rows.append(("to be had", size_words(host.budget)))
        if host.nvme_budget is not None:
            disk = f"{size_words(host.nvme_budget)} in {host.nvme_path}"
            rows.append(("disk to be had", f"{disk}, {size_words(host.spill)} needed of it"))
        taken = [values["host bytes"] for values in scalars.values() if "host bytes" in values]
        if taken:
            rows.append(("taken, by the rank that has most", size_words(max(taken))))
        return rows or [("needed", "not known yet")]

    def _plan(self, planned: PlannedSteps) -> list[Part]:
        from megatron_memo.training.plan_source import SAVED_FOLDER, SUFFIX
        from megatron_memo.training.planned import trace_name

        plan, report = planned.plan_in_use, planned.report()
        if plan is None:
            return [Table("Memory plan", [("in use", "not yet, or not any more: see below")])]
        last = report["steps"][-1]
        wanted = last["requests"] - last["native_entries"]
        gap = f"{size_words(plan.gap)} above" if plan.gap else "exactly"
        rows = [
            ("arena", f"{size_words(plan.arena)}, {gap} the proven bound (by {plan.bound_by})"),
            ("last step", f"{last['hits']:,} of {wanted:,} requests served at their addresses"),
            ("found by", plan.found_by),
        ]
        saved = Path(self._args.save) / SAVED_FOLDER / f"rank{self._args.rank:05d}{SUFFIX}"
        if saved.exists():
            trace = saved.with_name(trace_name(saved.name))
            rows.append(("more of it", f"megatron-memo plot all {saved} {trace} -o plan.html"))
        if self._layout is None or self._layout[0] is not plan:
            from megatron_memo.plot.layout import layout

            self._layout = plan, drawn(layout(plan))
        return [Table("Memory plan of this rank", rows), self._layout[1]]


def course(entries: Sequence[Entry], scalars: Scalars) -> Figure:
    """Loss, seconds, and bytes moved over the iterations."""
    iterations = Axis("iteration", Unit.COUNT)
    at = [entry.last for entry in entries]
    known = [entry for entry in entries if entry.loss is not None]
    panels = []
    if known:
        loss = [entry.loss for entry in known]
        line = _line([entry.last for entry in known], loss, "loss", BLUE)
        panels.append(Panel("Loss", iterations, Axis("loss", Unit.NUMBER), lines=(line,)))
    took = _line(at, [entry.seconds for entry in entries], "seconds of a step", ORANGE)
    seconds = Axis("one iteration", Unit.SECONDS, from_zero=True)
    panels.append(Panel("Time", iterations, seconds, lines=(took,)))
    moved = [
        _line(list(values), list(values.values()), label, colour)
        for name, label, colour in (
            ("D2H bytes", "to the host", GREEN),
            ("H2D bytes", "back to the device", PINK),
        )
        for values in (
            {step: told[name] for step, told in sorted(scalars.items()) if name in told},
        )
        if values
    ]
    if moved:
        moves = Axis("moved in one iteration", Unit.BYTES, from_zero=True)
        panels.append(Panel("Swapped", iterations, moves, lines=tuple(moved)))
    return Figure("course", "The course of the run", (), tuple(panels))


def _line(x: list[int], y: list[Any], label: str, colour: Colour) -> Line:
    return Line(x, y, label, colour, markers=len(x) == 1)


def _seconds(entries: Sequence[Entry]) -> str:
    from megatron_memo.estimate.table import seconds_words

    later = entries[1:] or entries
    steps = sum(entry.steps for entry in later)
    mean = sum(entry.seconds * entry.steps for entry in later) / steps
    words = f"{seconds_words(mean)} in the mean, {seconds_words(entries[-1].seconds)} last"
    return words + (" (the first left out of the mean)" if len(entries) > 1 else "")
