"""What the code says to people, as templates: a quoted line is one of them, or made of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLE = "\0"  # where a value stands


@cache
def templates() -> tuple[str, ...]:
    """Every string of the package, with a hole for each value in it."""
    found: set[str] = set()
    for path in sorted((ROOT / "megatron_memo").rglob("*.py")):
        found.update(_strings(ast.parse(path.read_text())))
    return tuple(sorted(found))


def has_template(quote: str) -> bool:
    """Whether code says `quote`, in which `...` stands for anything.

    A message may be made of several strings, as a reason within a sentence is; so each part between
    dots, but the very short ones, has to be in some string.
    """
    parts = [part.strip() for part in quote.split("...")]
    return all(_somewhere(part) for part in parts if len(part) > 3)


def is_made_of(line: str) -> bool:
    """Whether a printed line begins with what some template makes."""
    return any(pattern.match(line) for pattern in _patterns())


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(
        re.compile(".+?".join(re.escape(part) for part in template.split(HOLE)))
        for template in templates()
        # Enough words of its own to be told from others.
        if len(template.replace(HOLE, "")) > 12
    )


def _somewhere(part: str) -> bool:
    return any(part in template for template in templates())


def _strings(tree: ast.AST) -> Iterator[str]:
    within = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            within.update(id(value) for value in node.values)
            yield "".join(
                str(value.value) if isinstance(value, ast.Constant) else HOLE
                for value in node.values
            )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in within
        ):
            yield node.value
