"""How help looks: paragraphs filled to the terminal, everything with indented lines as written."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping


class HelpFormatter(argparse.HelpFormatter):
    """A description or epilog is paragraphs between empty lines. One with an indented line is a
    list or an example, and stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [part.strip("\n") for part in re.split(r"\n[ \t]*\n", textwrap.dedent(text))]
        return "\n\n".join(
            textwrap.indent(part, indent)
            if any(line[:1].isspace() for line in part.splitlines())
            else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in paragraphs
        )


def aligned(entries: Mapping[str, str], width: int = 80) -> str:
    """Names and their meanings as indented columns, for an epilog."""
    wide = max(map(len, entries))
    return "\n".join(
        textwrap.fill(
            meaning,
            width,
            initial_indent=f"  {name:>{wide}}  ",
            subsequent_indent=" " * (wide + 4),
        )
        for name, meaning in entries.items()
    )
