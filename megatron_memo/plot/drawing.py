"""One panel of a figure on matplotlib's axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_memo.plot import ticks
from megatron_memo.plot.figure import Axis, Band, Boxes, Line, Panel, Unit
from megatron_memo.plot.palette import Ground

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OUTLINED = 0.008  # boxes wider and higher than this part of all get an outline


def draw_panel(axes: Axes, panel: Panel, theme: str, ground: Ground) -> None:
    """Everything of a panel but the legend."""
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_axisbelow(True)
    axes.grid(axis="both" if panel.lines else "x", linewidth=0.6)
    if panel.x.log:
        axes.set_xscale("log", base=2)
    if panel.y.log:
        axes.set_yscale("log", base=2)
    if panel.boxes is not None:
        _draw_boxes(axes, panel.boxes, theme, ground, outlines=not panel.y.lanes)
    for line in panel.lines:
        _draw_line(axes, line, theme, ground)
    _view(axes, panel)
    for limit in panel.limits:
        _draw_limit(axes, limit.x, limit.y, limit.label, ground)
    _draw_bands(axes, panel.bands, ground)
    _axis(axes, panel.x, horizontal=True)
    _axis(axes, panel.y, horizontal=False)


def _draw_boxes(axes: Axes, boxes: Boxes, theme: str, ground: Ground, *, outlines: bool) -> None:
    from matplotlib.collections import PolyCollection

    sides = list(zip(boxes.x0, boxes.x1, boxes.y0, boxes.y1, strict=True))
    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in sides]
    colours = [boxes.colours[k].on(theme) for k in boxes.colour]
    # Rasterized: tens of thousands of paths would be megabytes of SVG.
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="face", lw=0.25, rasterized=True)
    )
    axes.autoscale_view()
    if outlines:
        wide = (max(boxes.x1) - min(boxes.x0)) * _OUTLINED
        high = (max(boxes.y1) - min(boxes.y0)) * _OUTLINED
        large = [
            corner
            for corner, (x0, x1, y0, y1) in zip(corners, sides, strict=True)
            if x1 - x0 > wide and y1 - y0 > high
        ]
        axes.add_collection(
            PolyCollection(
                large, facecolors="none", edgecolors=ground.plot, lw=0.3, rasterized=True
            )
        )


def _draw_line(axes: Axes, line: Line, theme: str, ground: Ground) -> None:
    colour = line.colour.on(theme)
    style: Any = (0, (4, 2)) if line.dashed else "-"
    drawn = "steps-post" if line.steps else "default"
    if line.fill:
        step: Any = "post" if line.steps else None
        axes.fill_between(line.x, line.y, step=step, color=colour, alpha=0.35, linewidth=0)
    if line.join:
        width = 0.6 if line.fill else 1.6
        axes.plot(line.x, line.y, color=colour, linewidth=width, linestyle=style, drawstyle=drawn)
    if line.markers:
        hollow = line.hollow or [False] * len(line.x)
        inside = [ground.plot if open_ else colour for open_ in hollow]
        size = 22 if line.join else 60
        shape = "o" if line.join else "D"
        axes.scatter(
            line.x, line.y, s=size, c=inside, edgecolors=colour, linewidths=1.2, marker=shape,
            zorder=3,
        )  # fmt: skip

    if line.ends is not None:
        for name, at in zip(line.ends, (0, -1), strict=True):
            place: Any = (line.x[at], line.y[at])
            axes.annotate(
                name, place, xytext=(7, -7), textcoords="offset points", va="center", fontsize=7,
                color=ground.faint,
            )  # fmt: skip


def _view(axes: Axes, panel: Panel) -> None:
    if panel.x.lanes or not panel.lines:
        axes.margins(x=0)
    if panel.x.from_zero:
        axes.set_xlim(left=0)
    if panel.bands or panel.x.unit is Unit.COUNT:
        axes.margins(x=0)
    if panel.y.lanes:
        axes.set_ylim(len(panel.y.lanes), 0)
    elif panel.y.from_zero:
        _, high = axes.get_ylim()
        axes.set_ylim(0, max([high, *(1.02 * limit.y for limit in panel.limits if limit.y)]))


def _draw_limit(axes: Axes, x: float | None, y: float | None, text: str, ground: Ground) -> None:
    if y is not None:
        axes.axhline(y, color=ground.ink, linewidth=1, linestyle=(0, (1, 1.5)))
        place: Any = (1, y)
        axes.annotate(
            text, place, xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5,
            xytext=(-2, 2), textcoords="offset points",
        )  # fmt: skip
    if x is not None:
        axes.axvline(x, color=ground.ink, linewidth=1, linestyle=(0, (1, 1.5)))
        place = (x, 0.02)
        axes.annotate(
            text, place, xycoords=("data", "axes fraction"), ha="right", va="bottom", fontsize=7.5,
            rotation=90, xytext=(-2, 0), textcoords="offset points",
        )  # fmt: skip


def _draw_bands(axes: Axes, bands: tuple[Band, ...], ground: Ground) -> None:
    """Names along the top of what is wide enough, with ticks between."""
    if not bands:
        return
    low, high = axes.get_xlim()
    for band in bands:
        share = (band.x1 - band.x0) / (high - low)
        place: Any = "axes fraction"
        across = axes.get_xaxis_transform()
        axes.plot(
            [band.x0, band.x1], [1.012] * 2, transform=across, color=ground.faint, linewidth=2.2,
            clip_on=False, solid_capstyle="butt", alpha=0.9 if bands.index(band) % 2 else 0.45,
        )  # fmt: skip
        if share > 0.012 * len(band.label):
            axes.annotate(
                band.label, ((band.x0 + band.x1) / 2, 1.02), xycoords=("data", place), ha="center",
                va="bottom", fontsize=7.5, color=ground.faint, annotation_clip=False,
            )  # fmt: skip


def _axis(axes: Axes, axis: Axis, *, horizontal: bool) -> None:
    low, high = sorted(axes.get_xlim() if horizontal else axes.get_ylim())
    one = axes.xaxis if horizontal else axes.yaxis
    if axis.lanes:
        one.set_ticks([row + 0.5 for row in range(len(axis.lanes))], list(axis.lanes))
        one.set_tick_params(length=0)
        return
    unit, size = ticks.scale(axis, low, high)
    if axis.log:
        places = ticks.doublings(low, high)
        if len(places) < 3:
            places = ticks.round_ticks(low, high)
    else:
        places = [place * size for place in ticks.round_ticks(low / size, high / size)]
    one.set_ticks(places, [ticks.written(axis, place, size) for place in places])
    one.set_ticks([], minor=True)
    one.set_label_text(ticks.label(axis, unit))
