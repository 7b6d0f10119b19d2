"""The page: what is in it, that it loads nothing, and that it works in a browser."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_memo.estimate.strategies import Memo
from megatron_memo.estimate.timeline import simulate
from megatron_memo.plot.figure import Axis, Figure, Line, Panel, Unit
from megatron_memo.plot.layout import layout
from megatron_memo.plot.memory import memory
from megatron_memo.plot.page import DATA_TYPE, Table, Words, page, unpacked
from megatron_memo.plot.palette import BLUE
from megatron_memo.plot.streams import streams

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NASTY = "</script><img src=x onerror=alert(1)>&\"'"
# Elements that load something by themselves, and attributes that name what.
LOADING = {"link", "img", "iframe", "object", "embed", "audio", "video", "source", "base"}
VOID = {"meta"}


class Reader(HTMLParser):
    """Elements in order, text of scripts by type, and whether every element is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.scripts, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append([dict(attrs).get("type", ""), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        else:
            self.text += data

    def figures(self):
        return [unpacked(data) for kind, data in self.scripts if kind == DATA_TYPE]


@pytest.fixture(scope="module")
def figures(planned, costs):
    result = simulate(costs, Memo(0.5, chunks=4, resident=0))
    return [layout(planned.plan, planned.trace), memory(planned.plan), streams(result, "a job")]


@pytest.fixture(scope="module")
def written(figures, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page("Everything", [*figures, Table("Rows", [("a", "b")])]), "utf-8")
    return path


def test_a_page_holds_the_figures_exactly(figures, written):
    found = Reader(written.read_text("utf-8")).figures()
    assert [one["name"] for one in found] == ["layout", "memory", "streams"]
    boxes = figures[0].panels[0].boxes
    for side in ("x0", "x1", "y0", "y1", "colour"):
        assert found[0]["panels"][0]["boxes"][side] == list(getattr(boxes, side))
    lines = found[1]["panels"][0]["lines"]
    assert [line["y"] for line in lines] == [list(line.y) for line in figures[1].panels[0].lines]
    assert found[2]["panels"][0]["y"]["lanes"] == list(figures[2].panels[0].y.lanes)


def test_a_page_names_nothing_to_load_and_forbids_it(written):
    text = written.read_text("utf-8")
    read = Reader(text)
    assert not LOADING & {tag for tag, _ in read.elements}
    assert not [attrs for _, attrs in read.elements if "src" in attrs or "href" in attrs]
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}/", text.lower())
    assert "@import" not in text and "url(" not in text
    policy = next(a["content"] for t, a in read.elements if a.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    (script,) = [body for kind, body in read.scripts if kind != DATA_TYPE]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy


def test_text_from_outside_stays_text():
    line = Line([1, 2], [3, 4], NASTY, BLUE.named(NASTY))
    axis = Axis(NASTY, Unit.COUNT)
    figure = Figure("nasty", NASTY, (NASTY,), (Panel(NASTY, axis, axis, lines=(line,)),))
    text = page(NASTY, [figure, Table(NASTY, [(NASTY, NASTY)], [NASTY]), Words(NASTY, [NASTY])])
    read = Reader(text)
    assert "img" not in {tag for tag, _ in read.elements}
    assert read.text.count(NASTY) == 10
    assert read.figures()[0]["panels"][0]["lines"][0]["label"] == NASTY


@pytest.mark.parametrize(("theme", "said"), [(None, None), ("dark", "dark")])
def test_a_theme_is_fixed_only_if_asked_for(theme, said):
    (html,) = [a for t, a in Reader(page("x", [], theme=theme)).elements if t == "html"]
    assert html.get("data-theme") == said


def test_ten_thousand_blocks_stay_below_a_megabyte(figures):
    many = 10_000
    boxes = figures[0].panels[0].boxes
    repeat = -(-many // len(boxes.x0))
    wide = {
        name: [value + k * 99_991 for k in range(repeat) for value in getattr(boxes, name)]
        for name in ("x0", "x1")
    }
    same = {n: list(getattr(boxes, n)) * repeat for n in ("y0", "y1", "colour")}
    told = tuple(replace(fact, values=list(fact.values) * repeat) for fact in boxes.facts)
    panel = replace(figures[0].panels[0], boxes=replace(boxes, **wide, **same, facts=told))
    assert len(page("many", [replace(figures[0], panels=(panel,))])) < 1 << 20


class Browser:
    """Chromium without a window, driven over a pipe (`--remote-debugging-pipe`)."""

    def __init__(self, profile):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            # The browser reads commands from file 3 and answers on file 4.
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', CHROMIUM, *flags,
             f"--user-data-dir={profile}", "--window-size=1200,900"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", None
        self.events = []

    def open(self, path):
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.command(f"{domain}.enable")
        self.command("Page.navigate", url=Path(path).as_uri())

    def command(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def value(self, script):
        """Of an expression; promises are waited for."""
        found = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x, y):
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self):
        self._session = None
        self.command("Browser.close")
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)


DRAWN = """new Promise((done) => { const look = () => document.querySelectorAll("canvas").length
 === 3 ? requestAnimationFrame(() => requestAnimationFrame(() => done(true)))
 : setTimeout(look, 20); look(); })"""
WHERE = """(() => { const canvas = document.querySelectorAll("canvas")[%d];
 canvas.scrollIntoView({block: "center"}); const r = canvas.getBoundingClientRect();
 return [r.left, r.top, r.width, r.height]; })()"""
HOVER = '(() => { const h = document.querySelectorAll(".hover")[%d]; return h.style.display === '
HOVER += '"block" ? h.innerText : ""; })()'
PIXELS = """(() => { const c = document.querySelector("canvas"); return Array.from(
 c.getContext("2d").getImageData(0, 0, 3, 3).data.slice(0, 3)); })()"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, and there is none on this machine")
def test_in_a_browser_figures_are_drawn_and_hovered_and_nothing_is_loaded(written, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.open(written)
        assert browser.value(DRAWN)
        for number, said in enumerate(("size", "alive", "takes")):
            left, top, width, height = browser.value(WHERE % number)
            told = ""
            for share in (0.31, 0.5, 0.67, 0.83):
                for down in (0.3, 0.55, 0.7, 0.85):
                    browser.move(left + share * width, top + down * height)
                    told = told or browser.value(HOVER % number)
            assert said in told
        before = browser.value(PIXELS)
        browser.value('document.getElementById("theme").click()')
        assert browser.value(DRAWN) and browser.value(PIXELS) != before
        refused = browser.value('fetch("data:,x").then(() => "loaded", () => "refused")')
        assert refused == "refused"
    finally:
        browser.close()
    asked = [e["params"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    loaded = {one["request"]["url"] for one in asked if one["request"]["url"] != "data:,x"}
    assert loaded == {written.as_uri()}
    assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
