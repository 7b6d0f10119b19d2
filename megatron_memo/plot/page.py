"""Figures, tables and text as one HTML file that needs no network.

NOTE: what makes it self-contained
----------------------------------
* Styles and scripts (`viewer/`) are in the file; fonts are the reader's own.
* A content security policy forbids every load, and every script but this file's own, by its hash.
* A figure is a block of data (JSON, deflated, base64) in a script element of a type that no browser
  runs; `viewer/page.js` unpacks it and draws it on a canvas.
* All text from outside goes through `escape`; scripts set text only as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from megatron_memo.plot.figure import Figure
from megatron_memo.plot.palette import GROUNDS, Ground

_VIEWER = Path(__file__).parent / "viewer"
_SCRIPTS = ("scale.js", "chart.js", "under.js", "legend.js", "page.js")
DATA_TYPE = "application/x-memo-figure"


@dataclass(frozen=True)
class Table:
    """Rows under a title; the first cell of a row names it.

    Attributes:
        head: names of the columns; none if empty.
    """

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True)
class Words:
    """Lines of text under a title, as they were said."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Drawn:
    """A figure that was packed before, for what is shown again and again."""

    html: str


Part = Figure | Table | Words | Drawn


def page(title: str, parts: Sequence[Part], *, lead: str = "", theme: str | None = None) -> str:
    """The file's content.

    Args:
        title: of the page.
        parts: from the top.
        lead: a sentence under the title.
        theme: "light" or "dark"; None follows the reader's system.
    """
    style, script = _style(), _script()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(_html(part) for part in parts)
    chosen = f' data-theme="{escape(theme)}"' if theme else ""
    above = f"<p>{escape(lead)}</p>" if lead else ""
    return (
        f'<!doctype html>\n<html lang="en"{chosen}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>"
        '<button id="theme" type="button">theme</button></header>\n'
        f"{above}\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def drawn(figure: Figure) -> Drawn:
    """The figure, packed once."""
    return Drawn(_html(figure))


def unpacked(block: str) -> dict[str, Any]:
    """What a block of data holds: what `viewer/page.js` sees."""
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(block)))
    return found


def _html(part: Part) -> str:
    if isinstance(part, Drawn):
        return part.html
    if isinstance(part, Figure):
        notes = "".join(f"<li>{escape(note)}</li>" for note in part.notes)
        return (
            f'<section class="figure" id="{escape(part.name)}"><h2>{escape(part.title)}</h2>'
            '<div class="legend"></div><div class="panels"><noscript>This figure is drawn by a '
            f'script of this file, and scripts are off.</noscript></div><ul class="notes">{notes}'
            f'</ul><script type="{DATA_TYPE}">{_packed(part)}</script></section>'
        )
    if isinstance(part, Table):
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in part.head)
        rows = "".join(_row(row) for row in part.rows)
        above = f"<thead><tr>{head}</tr></thead>" if head else ""
        return (
            f'<section><h2>{escape(part.title)}</h2><div class="wide"><table>{above}<tbody>{rows}'
            "</tbody></table></div></section>"
        )
    lines = "\n".join(escape(line) for line in part.lines)
    return f"<section><h2>{escape(part.title)}</h2><pre>{lines}</pre></section>"


def _row(cells: Sequence[str]) -> str:
    first, *others = (escape(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'


def _packed(figure: Figure) -> str:
    text = json.dumps(figure, default=_plain, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _plain(value: object) -> dict[str, Any]:
    assert is_dataclass(value), f"no part of a figure: {value!r}"
    return {field.name: getattr(value, field.name) for field in fields(value)}


@cache
def _style() -> str:
    light, dark = (_variables(GROUNDS[theme]) for theme in ("light", "dark"))
    own = (_VIEWER / "page.css").read_text(encoding="utf-8")
    return (
        f":root{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n{own}"
    )


def _variables(ground: Ground) -> str:
    return "".join(f"--{name}:{value};" for name, value in ground._asdict().items())


@cache
def _script() -> str:
    files = [(_VIEWER / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(files) + "})();\n"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
