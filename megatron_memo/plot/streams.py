"""The simulated iteration of an estimate as a timeline: a row for each stream that did anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_memo.estimate.clock import (
    COMPUTE,
    CP,
    D2H,
    DISK_READ,
    DISK_WRITE,
    DP,
    H2D,
    PP,
    TP,
    Event,
)
from megatron_memo.estimate.clock import STREAMS as KNOWN
from megatron_memo.estimate.result import Result
from megatron_memo.estimate.table import seconds_words
from megatron_memo.phases import BACKWARD, FORWARD, LAYER
from megatron_memo.plot.figure import Axis, Band, Boxes, Fact, Figure, Panel, Unit
from megatron_memo.plot.palette import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    YELLOW,
)

_ROWS = {
    COMPUTE: "compute",
    D2H: "to host",
    H2D: "from host",
    DISK_WRITE: "disk, write",
    DISK_READ: "disk, read",
    TP: "tensor parallel",
    CP: "context parallel",
    PP: "pipeline",
    DP: "data parallel",
}
_COLOURS = (
    SKY.named("forward: attention"),
    BLUE.named("forward: the rest"),
    YELLOW.named("backward: attention"),
    ORANGE.named("backward: the rest"),
    VERMILION.named("computed again"),
    GREEN.named("to host or disk"),
    PINK.named("back to the device"),
    GREY.named("between GPUs"),
    INK.named("optimizer"),
)
_OF_STREAM = {D2H: 5, DISK_WRITE: 5, H2D: 6, DISK_READ: 6, TP: 7, CP: 7, PP: 7, DP: 7}
_MARGIN = 0.1  # of a row, above and below a box
_SHOWN_LAYERS = 2  # in a close-up


def streams(result: Result, of: str) -> Figure:
    """The figure; close-ups show two layers' forward and backward of the first stage.

    Args:
        result: of `estimate.timeline.simulate`.
        of: model and machine, in words.
    """
    events = [event for stage in result.stages for event in stage.events]
    used = {(event.stage, event.stream) for event in events}
    order = [
        (stage.stage, name)
        for stage in result.stages
        for name in KNOWN
        if (stage.stage, name) in used
    ]
    several = len(result.stages) > 1
    rows = {place: row for row, place in enumerate(order)}
    lanes = [f"stage {s}: {_ROWS[name]}" if several else _ROWS[name] for s, name in order]
    at = [rows[event.stage, event.stream] for event in events]
    shown = [_colour(event) for event in events]
    kept = sorted(set(shown))  # no legend for what does not occur
    titles, places = _texts([_title(event) for event in events])
    phases, of_phase = _texts([str(event.phase) for event in events])
    facts = (
        Fact("", places, names=titles),
        Fact("in", of_phase, names=phases),
        Fact("takes", [event.seconds for event in events], Unit.SECONDS),
        Fact("begins", [event.start for event in events], Unit.SECONDS),
        Fact("moves", [event.nbytes for event in events], Unit.BYTES),
    )
    boxes = Boxes(
        [event.start for event in events],
        [event.start + event.seconds for event in events],
        [row + _MARGIN for row in at],
        [row + 1 - _MARGIN for row in at],
        [kept.index(colour) for colour in shown],
        tuple(_COLOURS[colour] for colour in kept),
        facts,
    )
    first = [event for event in events if event.stage == 0 and event.stream == COMPUTE]
    exposed = sum(result.exposed.get(name, 0.0) for name in (D2H, H2D, DISK_WRITE, DISK_READ))
    notes = (
        f"{of}. {result.strategy}: a step of {seconds_words(result.seconds)}, "
        f"{exposed / result.seconds:.1%} of it waiting for copies; MFU {result.mfu_full:.1%} "
        f"(attention counted in full) or {result.mfu_causal:.1%} (causal).",
        "Simulated from the GPU's datasheet, not measured.",
    )
    panel = Panel(
        "",
        Axis("time in the iteration", Unit.SECONDS, from_zero=True),
        Axis("", Unit.COUNT, lanes=tuple(lanes)),
        boxes,
        bands=_bands(first, lambda event: event.phase.direction or event.phase.part),
        fine=_bands(
            first,
            lambda event: str(event.phase._replace(chunk=None, micro_batch=None, stage=None)),
        ),
        zooms=_zooms(first),
    )
    return Figure("streams", "What each stream does in one iteration", notes, (panel,))


def _colour(event: Event) -> int:
    if event.stream != COMPUTE:
        return _OF_STREAM[event.stream]
    if event.name.endswith(" again"):
        return 4
    if event.phase.direction not in (FORWARD, BACKWARD):
        return 8
    rest = not event.name.startswith("attention")
    return 2 * (event.phase.direction == BACKWARD) + rest


def _title(event: Event) -> str:
    return event.name if event.nbytes else f"{_ROWS[event.stream]}: {event.name}"


def _texts(all_of_them: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    places: dict[str, int] = {}
    values = [places.setdefault(text, len(places)) for text in all_of_them]
    return tuple(places), values


def _bands(events: Sequence[Event], name: Callable[[Event], str]) -> tuple[Band, ...]:
    found: list[Band] = []
    for event in events:
        label, end = name(event), event.start + event.seconds
        if found and found[-1].label == label:
            found[-1] = Band(found[-1].x0, end, label)
        else:
            found.append(Band(event.start, end, label))
    return tuple(found)


def _zooms(events: Sequence[Event]) -> tuple[Band, ...]:
    """Two layers in the middle of the first forward, and of its backward."""
    found = []
    for direction in (FORWARD, BACKWARD):
        own = [
            event
            for event in events
            if event.phase.part == LAYER
            and event.phase.direction == direction
            and not event.phase.micro_batch
        ]
        layers = list(dict.fromkeys(event.phase.layer for event in own))
        middle = layers[len(layers) // 2 :][:_SHOWN_LAYERS]
        inside = [event for event in own if event.phase.layer in middle]
        if inside:
            ends = max(event.start + event.seconds for event in inside)
            names = " and ".join(str(layer) for layer in middle)
            words = f"layer{'s' if len(middle) > 1 else ''} {names}, {direction}"
            found.append(Band(inside[0].start, ends, words))
    return tuple(found)
