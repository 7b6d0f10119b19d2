"""Sphinx extension: directives whose content is generated from the code.

    {memo-flags}              flags of the launcher
    {memo-commands}           every `megatron-memo` command, a section each
    {memo-refusals}           what is refused
    {memo-works}              what works together, and the tests
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import memo_compatibility
import memo_flags
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


class _Generated(SphinxDirective):
    """A directive whose content is Markdown that a function gives."""

    make: Callable[[], str]
    sources = "**/*.py"  # of the package: a page is built anew when one of them changes

    def run(self) -> list[nodes.Node]:
        text = self.make()
        for path in sorted((ROOT / "megatron_memo").glob(self.sources)):
            self.env.note_dependency(str(path))
        for path in sorted(Path(__file__).parent.glob("*.py")):
            self.env.note_dependency(str(path))
        lines = StringList(text.splitlines(), self.get_source_info()[0])
        holder = nodes.Element()
        self.state.nested_parse(lines, 0, holder, match_titles=True)
        return holder.children


def _directive(function: Callable[[], str], sources: str) -> type[_Generated]:
    members = {"make": staticmethod(function), "sources": sources}
    return type(function.__name__, (_Generated,), members)


def setup(app: Sphinx) -> dict[str, Any]:
    for name, function, sources in (
        ("memo-flags", memo_flags.launcher_flags, "arguments.py"),
        ("memo-commands", memo_flags.commands, "**/*.py"),
        ("memo-refusals", memo_compatibility.refusals, "refusals.py"),
        ("memo-works", memo_compatibility.works, "refusals.py"),
    ):
        app.add_directive(name, _directive(function, sources))
    return {"parallel_read_safe": True}
