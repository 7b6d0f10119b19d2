"""Plain sentences of the code as Markdown: nothing in them is markup by accident."""

from __future__ import annotations

import re

# A flag, with the word after it left alone; or code that is marked as such already.
_CODE = re.compile(r"`[^`]+`|(?<![\w-])--[a-z][\w-]*(?:\.\.\.)?")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~^$])")


def prose(text: str) -> str:
    """`text` with flags as code and everything else escaped."""
    parts, at = [], 0
    for found in _CODE.finditer(text):
        parts.append(_SPECIAL.sub(r"\\\1", text[at : found.start()]))
        word = found.group()
        parts.append(word if word.startswith("`") else f"`{word}`")
        at = found.end()
    parts.append(_SPECIAL.sub(r"\\\1", text[at:]))
    return "".join(parts)


def indent(text: str, by: int) -> str:
    """Every line but empty ones moved to the right."""
    return "\n".join(" " * by + line if line else line for line in text.splitlines())


def table(
    headings: list[str], rows: list[list[str]], widths: list[int], *, wrap: bool = True
) -> str:
    """A table of Markdown cells, each of any number of lines, as MyST's list-table.

    Args:
        headings: of the columns.
        rows: cells of each row.
        widths: of the columns, relative to each other.
        wrap: cells are sentences; otherwise a wide table scrolls.
    """
    lines = [
        "::::::{list-table}",
        ":header-rows: 1",
        f":widths: {' '.join(map(str, widths))}",
        f":class: {'memo-wrap' if wrap else 'memo-numbers'}",
        "",
    ]
    for row in [headings, *rows]:
        for place, cell in enumerate(row):
            head = "* - " if place == 0 else "  - "
            lines.append(head + indent(cell, 4).lstrip())
    lines.append("::::::")
    return "\n".join(lines)
