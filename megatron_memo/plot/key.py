"""The legend of a figure that matplotlib draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_memo.plot.figure import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND_COLUMNS = 150  # characters


class Legend:
    """One for all panels: colours of boxes, then lines; an ordered family gets a scale.

    Attributes:
        rows: lines of text that it takes.
    """

    def __init__(self, panels: list[Panel], theme: str) -> None:
        first = panels[0].boxes
        self._theme = theme
        self._family = [] if first is None else [c for c in first.colours if c.ramp]
        self._handles = _handles(panels, theme)
        if len(self._family) == 1:
            only = self._family.pop()
            self._handles[only.label] = _patch(only.on(theme), only.label)
        widest = max((len(name) for name in self._handles), default=0) + 7
        self._columns = max(1, min(_LEGEND_COLUMNS // widest, len(self._handles)))
        self.rows = -(-len(self._handles) // self._columns)

    def draw(self, canvas: Any, axes: list[Axes], top: float) -> None:
        """Below `top`, a share of the canvas's height."""
        if self._family:
            self._scale(canvas, axes)
        if self._handles:
            shown = canvas.legend(
                handles=list(self._handles.values()), loc="upper left", frameon=False, fontsize=8,
                ncols=self._columns, bbox_to_anchor=(0.004, top), borderpad=0.1, labelspacing=0.35,
            )  # fmt: skip
            shown.set_in_layout(False)

    def _scale(self, canvas: Any, axes: list[Axes]) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        family = self._family
        colours = ListedColormap([colour.on(self._theme) for colour in family])
        scale = ScalarMappable(Normalize(0.5, len(family) + 0.5), colours)
        bar = canvas.colorbar(scale, ax=axes, pad=0.01, fraction=0.025, aspect=40)
        bar.outline.set_visible(False)
        bar.set_ticks([1, len(family)], labels=[family[0].label, family[-1].label])
        bar.ax.tick_params(length=0, labelsize=7.5, labelrotation=90)
        for text, side in zip(bar.ax.get_yticklabels(), ("bottom", "top"), strict=True):
            text.set_verticalalignment(side)


def _handles(panels: list[Panel], theme: str) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for panel in panels:
        for colour in panel.boxes.colours if panel.boxes is not None else ():
            if not colour.ramp:
                found[colour.label] = _patch(colour.on(theme), colour.label)
        for line in panel.lines:
            shown = line.colour.on(theme)
            style = ("--" if line.dashed else "-") if line.join else "none"
            shape = ("o" if line.join else "D") if line.markers else None
            found[line.label] = (
                _patch(shown, line.label, alpha=0.45)
                if line.fill
                else Line2D(
                    [], [], color=shown, label=line.label, ls=style, marker=shape, markersize=5
                )
            )
    return found


def _patch(colour: str, label: str, **more: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, **more)
