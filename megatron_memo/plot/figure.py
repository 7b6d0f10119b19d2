"""What a picture shows, apart from how it is drawn: `static` and `page` draw the same figures.

Numbers are bytes, seconds, tokens or counts; an axis says which, and whoever draws it chooses GiB
or MiB by what is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_memo.plot.palette import Colour


class Unit(StrEnum):
    """What the numbers of an axis are, and how ticks and hovers are written."""

    BYTES = "bytes"
    SECONDS = "seconds"
    TOKENS = "tokens"
    COUNT = "count"  # whole numbers
    NUMBER = "number"
    SHARE = "share"  # 0 to 1, written in per cent


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what, without the unit where that is bytes or seconds.
        unit: of its numbers.
        log: doublings are equally far apart.
        lanes: names of the rows of a timeline, from the top; such an axis has no ticks, and its
            numbers are rows.
        from_zero: 0 is in view.
    """

    label: str
    unit: Unit
    log: bool = False
    lanes: tuple[str, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True)
class Fact:
    """A line of a hover.

    Attributes:
        label: what.
        values: one for each box or point; numbers of `unit`, or places in `names`.
        unit: None where `names` are given.
        names: texts, each once.
    """

    label: str
    values: Sequence[float]
    unit: Unit | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Boxes:
    """Rectangles. All sequences are of one length.

    Attributes:
        x0, x1, y0, y1: their sides.
        colour: places in `colours`.
        colours: of which those with `ramp` are shown as one scale.
        facts: what a hover says.
    """

    x0: Sequence[float]
    x1: Sequence[float]
    y0: Sequence[float]
    y1: Sequence[float]
    colour: Sequence[int]
    colours: tuple[Colour, ...]
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Line:
    """A series of points.

    Attributes:
        x, y: of the points, in order.
        label: in the legend.
        colour: of the line.
        steps: y holds until the next x.
        fill: the area below is filled.
        dashed: as is.
        markers: every point is marked; hollow where `hollow` says so.
        join: the points are joined.
        hollow: of each point; none is if empty.
        ends: what the first and the last point are called.
        facts: what a hover says besides x and y.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str
    colour: Colour
    steps: bool = False
    fill: bool = False
    dashed: bool = False
    markers: bool = False
    join: bool = True
    hollow: Sequence[bool] = ()
    ends: tuple[str, str] | None = None
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Limit:
    """A labelled line across a panel: at x or at y, the other is None."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Band:
    """A named stretch of the x axis, shown along the top."""

    x0: float
    x1: float
    label: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what is in it.

    Attributes:
        bands: coarse ones; `fine` replace them where there is room.
        zooms: stretches of x that a picture without zoom shows beside the whole.
    """

    title: str
    x: Axis
    y: Axis
    boxes: Boxes | None = None
    lines: tuple[Line, ...] = ()
    limits: tuple[Limit, ...] = ()
    bands: tuple[Band, ...] = ()
    fine: tuple[Band, ...] = ()
    zooms: tuple[Band, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Panels under a title.

    Attributes:
        name: one word, for files and anchors.
        title: a claim or a question.
        notes: one sentence each: what it is of, what was assumed.
        panels: from left to right, or from the top where `stacked`.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    panels: tuple[Panel, ...]
    stacked: bool = field(default=False)
