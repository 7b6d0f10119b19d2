"""Sphinx extension: directives whose content is generated from the code.

{memo-flags}              flags of the launcher
{memo-commands}           every `megatron-memo` command, a section each
{memo-refusals}           what is refused
{memo-works}              what works together, and the tests
{memo-faults}             what goes wrong elsewhere, what holds it here, and the tests
{memo-result} FILE.csv    a table of benchmarks/results; `:columns:` picks some
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import memo_compatibility
import memo_exit
import memo_figures
import memo_flags
import memo_results

ROOT = Path(__file__).resolve().parents[2]


class _Generated(SphinxDirective):
    """A directive whose content is Markdown that a function gives."""

    make: Callable[[], str]
    sources = ""  # files of the repo: a page is built anew when one of them changes

    def markdown(self) -> str:
        return type(self).make()

    def run(self) -> list[nodes.Node]:
        text = self.markdown()
        for path in sorted(ROOT.glob(self.sources)):
            self.env.note_dependency(str(path))
        for path in sorted(Path(__file__).parent.glob("*.py")):
            self.env.note_dependency(str(path))
        lines = StringList(text.splitlines(), self.get_source_info()[0])
        holder = nodes.Element()
        self.state.nested_parse(lines, 0, holder, match_titles=True)
        return holder.children


class _Result(_Generated):
    """A table of measured or computed numbers."""

    sources = "benchmarks/results/*.csv"
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"columns": str}

    def markdown(self) -> str:
        return memo_results.result(self.arguments[0], self.options.get("columns", ""))


class _Figure(_Generated):
    """Both variants of a figure, of which the theme shows one."""

    sources = "docs/figures/*"
    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"alt": str}

    def markdown(self) -> str:
        (kind,) = self.arguments
        return memo_figures.figure(kind, self.options["alt"], "\n".join(self.content))


def _directive(function: Callable[[], str], sources: str) -> type[_Generated]:
    members = {"make": staticmethod(function), "sources": sources}
    return type(function.__name__, (_Generated,), members)


def setup(app: Sphinx) -> dict[str, Any]:
    for name, function, sources in (
        ("memo-flags", memo_flags.launcher_flags, "megatron_memo/arguments.py"),
        ("memo-commands", memo_flags.commands, "megatron_memo/**/*.py"),
        ("memo-refusals", memo_compatibility.refusals, "megatron_memo/refusals.py"),
        ("memo-exit", memo_exit.statuses, "megatron_memo/exit_status.py"),
        ("memo-works", memo_compatibility.works, "megatron_memo/refusals.py"),
        ("memo-faults", memo_compatibility.faults, "megatron_memo/refusals.py"),
    ):
        app.add_directive(name, _directive(function, sources))
    app.add_directive("memo-result", _Result)
    app.add_directive("memo-figure", _Figure)
    return {"parallel_read_safe": True}
