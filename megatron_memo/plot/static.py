"""Figures as PNG and SVG, drawn by matplotlib."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from megatron_memo.plot.drawing import draw_panel
from megatron_memo.plot.figure import Axis, Band, Boxes, Figure, Panel
from megatron_memo.plot.key import Legend
from megatron_memo.plot.palette import GROUNDS, Ground

FORMATS = (".png", ".svg")
_WIDTH = 9.6  # inches
_NOTE_COLUMNS = 165  # characters
_DPI = 150
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "megatron-memo",  # ids, and so the file, are the same every time
    "path.simplify": False,
}


class NoDrawing(ValueError):
    """matplotlib is not there."""


def draw(figure: Figure, path: Path, theme: str) -> None:
    """Writes the figure, whole or not at all; the suffix of `path` says in which of `FORMATS`.

    Raises:
        NoDrawing: matplotlib is not installed.
        OSError: the file can't be written.
    """
    content = rendered(figure, path.suffix, theme)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def rendered(figure: Figure, suffix: str, theme: str) -> bytes:
    """The file's content.

    Args:
        figure: what to draw.
        suffix: of `FORMATS`.
        theme: "light" or "dark".

    Raises:
        NoDrawing: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise NoDrawing(
            f"matplotlib is not installed ({error}), which draws {suffix} files. pip install "
            "'matplotlib>=3.9,<4', or write an .html, which needs nothing."
        ) from None
    ground = GROUNDS[theme]
    panels = [*figure.panels]
    stacked = figure.stacked
    for panel in figure.panels:
        panels += [_close_up(panel, zoom) for zoom in panel.zooms]
        stacked = stacked or bool(panel.zooms)
    body = _height(panels) * (len(panels) if stacked else 1)
    with matplotlib.rc_context({**_SETTINGS, **_inks(ground)}):
        notes = [line for note in figure.notes for line in textwrap.wrap(note, _NOTE_COLUMNS)]
        legend = Legend(panels, theme)
        top, foot = 0.42 + 0.21 * legend.rows, 0.12 + 0.145 * len(notes)
        height = top + body + foot
        canvas = Canvas(figsize=(_WIDTH, height), layout="constrained", dpi=_DPI)
        engine: Any = canvas.get_layout_engine()
        engine.set(rect=(0.006, foot / height, 0.988, body / height))
        rows, columns = (len(panels), 1) if stacked else (1, len(panels))
        grid = canvas.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=True):
            draw_panel(axes, panel, theme, ground)
        canvas.text(0.01, 1 - 0.09 / height, figure.title, va="top", fontsize=13, fontweight="bold")
        canvas.text(
            0.01, 0.06 / height, "\n".join(notes), va="bottom", fontsize=7.5, color=ground.faint
        )
        legend.draw(canvas, list(grid.flat), 1 - 0.36 / height)
        stream = io.BytesIO()
        if suffix == ".svg":
            canvas.savefig(stream, format="svg", dpi=_DPI, metadata={"Date": None})
            return stream.getvalue()
        canvas.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    return _smaller(stream)


def _smaller(png: io.BytesIO) -> bytes:
    """The same picture in 256 colours: a third of the bytes."""
    from PIL import Image

    smaller = io.BytesIO()
    with Image.open(png) as image:
        few = image.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(smaller, format="png", optimize=True)
    return smaller.getvalue()


def _inks(ground: Ground) -> Any:
    return {
        "figure.facecolor": ground.paper,
        "axes.facecolor": ground.plot,
        "axes.edgecolor": ground.grid,
        "axes.labelcolor": ground.ink,
        "text.color": ground.ink,
        "xtick.color": ground.grid,
        "ytick.color": ground.grid,
        "xtick.labelcolor": ground.faint,
        "ytick.labelcolor": ground.faint,
        "grid.color": ground.grid,
    }


def _height(panels: list[Panel]) -> float:
    """Inches of a panel."""
    rows = max(len(panel.y.lanes) for panel in panels)
    return max(0.28 * rows + 0.75, 1.4) if rows else 4.2


def _close_up(panel: Panel, zoom: Band) -> Panel:
    """The panel's stretch, by itself."""
    boxes = panel.boxes
    assert boxes is not None
    inside = [
        k
        for k, (x0, x1) in enumerate(zip(boxes.x0, boxes.x1, strict=True))
        if x1 > zoom.x0 and x0 < zoom.x1
    ]
    cut = Boxes(
        [max(boxes.x0[k], zoom.x0) for k in inside],
        [min(boxes.x1[k], zoom.x1) for k in inside],
        [boxes.y0[k] for k in inside],
        [boxes.y1[k] for k in inside],
        [boxes.colour[k] for k in inside],
        boxes.colours,
    )
    axis = Axis(panel.x.label, panel.x.unit)
    return Panel(f"Close up: {zoom.label}", axis, panel.y, cut)
