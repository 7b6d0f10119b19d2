"""A plan as a picture: time to the right, addresses upwards, a rectangle for each block."""

from __future__ import annotations

from itertools import groupby

from megatron_memo.phases import LAYER, Phase
from megatron_memo.plan.plan_file import Plan, PlanError, Window
from megatron_memo.plot.figure import Axis, Band, Boxes, Fact, Figure, Limit, Panel, Unit
from megatron_memo.plot.palette import GREY, INK, ORANGE, PINK, SKY, VERMILION, Colour, family
from megatron_memo.profile.trace import Malloc, Trace, rounded
from megatron_memo.sizes import size_words

EVENTS = Axis("position in the iteration, requests and frees", Unit.COUNT, from_zero=True)
_PARTS = {
    "embedding": VERMILION,
    "head": PINK,
    "optimizer": ORANGE,
    "update": SKY,
    "collective": INK,
}


def layout(plan: Plan, trace: Trace | None = None, window: int | None = None) -> Figure:
    """The figure of one window.

    Args:
        plan: verified.
        trace: of that window, verified against it; names of operators come from it.
        window: which, from 0; None for the one that needs most of the arena.

    Raises:
        PlanError: there is no such window.
    """
    number, shown = window_of(plan, window)
    placed = [(k, entry) for k, entry in enumerate(shown.entries) if entry.offset is not None]
    numbers, colours = _colours(shown.phases)
    lower = [entry.lower for _, entry in placed]
    upper = [entry.upper or entry.lower for _, entry in placed]
    offset = [entry.offset or 0 for _, entry in placed]
    size = [entry.size for _, entry in placed]
    facts = [
        Fact("", [entry.phase for _, entry in placed], names=tuple(map(str, shown.phases))),
        *_operators(trace, [k for k, _ in placed]),
        Fact("size", size, Unit.BYTES),
        Fact("at", offset, Unit.BYTES),
        Fact("from event", lower, Unit.COUNT),
        Fact("to event", upper, Unit.COUNT),
        Fact("request", [k for k, _ in placed], Unit.COUNT),
    ]
    boxes = Boxes(
        lower,
        upper,
        offset,
        [at + rounded(count, plan.rounding) for at, count in zip(offset, size, strict=True)],
        [numbers[entry.phase] for _, entry in placed],
        colours,
        tuple(facts),
    )
    proof = "as little as can be" if not plan.gap else f"{size_words(plan.gap)} above the bound"
    left = len(shown.entries) - len(placed)
    notes = (
        f"{shown.source}{_rank(plan)}: {len(placed):,} blocks in an arena of "
        f"{size_words(plan.arena)}, {proof} (proven: {size_words(plan.bound)}); found by "
        f"{plan.found_by}.",
        f"{left:,} requests are left to the native allocator and not shown.",
    )
    coarse, fine = bands(shown)
    panel = Panel(
        "",
        EVENTS,
        Axis("address in the arena", Unit.BYTES, from_zero=True),
        boxes,
        limits=(Limit(f"arena {size_words(plan.arena)}", y=plan.arena),),
        bands=coarse,
        fine=fine,
    )
    title = "Memory of one iteration, as planned"
    if len(plan.windows) > 1:
        title += f" (window {number} of {len(plan.windows)})"
    return Figure("layout", title, notes, (panel,))


def window_of(plan: Plan, window: int | None) -> tuple[int, Window]:
    """The window asked for and its number; see `layout`."""
    if window is None:
        tops = [
            max((e.offset + e.size for e in w.entries if e.offset is not None), default=0)
            for w in plan.windows
        ]
        window = tops.index(max(tops))
    if not 0 <= window < len(plan.windows):
        raise PlanError(
            f"--window {window}: the plan has {len(plan.windows)} windows, counted from 0"
        )
    return window, plan.windows[window]


def bands(window: Window) -> tuple[tuple[Band, ...], tuple[Band, ...]]:
    """Where in an iteration the requests are: by part and direction, and by layer."""
    end = max((entry.upper or entry.lower for entry in window.entries), default=0)
    coarse = [
        (entry.lower, " ".join(word for word in (phase.part, phase.direction) if word))
        for entry in window.entries
        for phase in (window.phases[entry.phase],)
        if phase.part != "collective"
    ]
    fine = [
        (entry.lower, f"layer {phase.layer}" if phase.layer is not None else phase.part)
        for entry in window.entries
        for phase in (window.phases[entry.phase],)
        if phase.part != "collective"
    ]
    return _joined(coarse, end), _joined(fine, end)


def _joined(starts: list[tuple[int, str]], end: int) -> tuple[Band, ...]:
    runs = [(next(iter(group))[0], name) for name, group in groupby(starts, lambda at: at[1])]
    ends = [start for start, _ in runs[1:]] + [end]
    return tuple(Band(start, until, name) for (start, name), until in zip(runs, ends, strict=True))


def _rank(plan: Plan) -> str:
    return f", rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""


def _colours(phases: tuple[Phase, ...]) -> tuple[list[int], tuple[Colour, ...]]:
    """The colour of each phase, as a place among the colours, and these."""
    layers = sorted({p.layer for p in phases if p.part == LAYER and p.layer is not None})
    colours = family([f"layer {layer}" for layer in layers])
    places: dict[object, int] = {layer: k for k, layer in enumerate(layers)}
    found = []
    for phase in phases:
        key: object = phase.layer if phase.part == LAYER else phase.part
        if key not in places:
            places[key] = len(colours)
            colours.append(_PARTS.get(phase.part, GREY).named(phase.part))
        found.append(places[key])
    return found, tuple(colours)


def _operators(trace: Trace | None, requests: list[int]) -> list[Fact]:
    if trace is None:
        return []
    asked = [event.what for event in trace.events if isinstance(event, Malloc)]
    places: dict[str, int] = {}
    values = [places.setdefault(asked[k], len(places)) for k in requests]
    if not any(places):
        return []  # a trace of a run's own requests, which has no names
    return [Fact("by", values, names=tuple(places))]
