"""PNG and SVG."""

import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_memo.plot.figure import Axis, Band, Boxes, Figure, Line, Panel, Unit
from megatron_memo.plot.layout import layout
from megatron_memo.plot.palette import BLUE, GREEN, ramp
from megatron_memo.plot.static import NoDrawing, draw, rendered


@pytest.fixture(scope="module")
def figure():
    """One of each thing that is drawn."""
    boxes = Boxes(
        [0, 10], [10, 20], [0, 1], [1, 2], [0, 1], (ramp(0.2, "layer 1"), ramp(0.8, "layer 2"))
    )
    lanes = Axis("", Unit.COUNT, lanes=("compute", "to host"))
    timed = Axis("time", Unit.SECONDS)
    line = Line([1, 2], [1 << 30, 2 << 30], "a line", BLUE, markers=True, hollow=[True, False])
    area = Line([1, 2], [1 << 30, 1 << 30], "an area", GREEN, steps=True, fill=True)
    length = Axis("length", Unit.TOKENS, log=True)
    return Figure(
        "one",
        "A title",
        ("A note.",),
        (
            Panel("Boxes", timed, lanes, boxes, zooms=(Band(0, 5, "the first"),)),
            Panel("Lines", length, Axis("memory", Unit.BYTES), lines=(line, area)),
        ),
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_png_has_pixels_and_few_bytes(figure, theme):
    png = rendered(figure, ".png", theme)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1440 and height > 600 and len(png) < 100_000


def test_an_svg_says_in_words_what_is_drawn_and_is_the_same_every_time(figure, monkeypatch):
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = rendered(figure, ".svg", "light")
        assert svg == rendered(figure, ".svg", "light")
    ElementTree.fromstring(svg)
    words = svg.decode()
    for text in ("A title", "A note.", "time (s)", "memory (GiB)", "length", "a line", "layer 2"):
        assert text in words
    assert "Close up: the first" in words and "to host" in words


def test_light_and_dark_differ(figure):
    assert rendered(figure, ".svg", "light") != rendered(figure, ".svg", "dark")


def test_a_layout_of_a_plan_is_drawn(planned, tmp_path):
    draw(layout(planned.plan), tmp_path / "it.png", "dark")
    assert [path.name for path in tmp_path.iterdir()] == ["it.png"]


def test_without_matplotlib_the_remedy_is_named_and_nothing_is_written(
    figure, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoDrawing, match=r"pip install 'matplotlib.*or write an \.html"):
        draw(figure, tmp_path / "it.png", "light")
    assert list(tmp_path.iterdir()) == []
