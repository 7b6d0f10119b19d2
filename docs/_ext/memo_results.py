"""Tables of benchmarks/results: the command and conditions that a file begins with; its rows."""

from __future__ import annotations

import csv
from pathlib import Path

from memo_text import prose, table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_DIGITS = 4


def result(name: str, columns: str = "") -> str:
    """Markdown of one file.

    Args:
        name: of a file in benchmarks/results.
        columns: those to show, in the file's order, with spaces between; all if empty.
    """
    lines = (RESULTS / name).read_text().splitlines()
    said = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    heading, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    missing = set(columns.split()) - set(heading)
    if missing:
        raise ValueError(f"{name} has no column {', '.join(sorted(missing))}")
    places = [i for i, one in enumerate(heading) if not columns or one in columns.split()]
    command, *conditions = said
    # Settings that a benchmark writes down for machines are in the file.
    conditions = [line for line in conditions if not line.startswith("{")]
    return "\n\n".join(
        [
            f"```{{code-block}} text\n{command}\n```",
            prose("; ".join([*conditions, f"benchmarks/results/{name}"])) + ".",
            table(
                [prose(heading[i].replace("_", " ")) for i in places],
                [[prose(_shown(row[i])) or "\\-" for i in places] for row in rows],
                [max(len(heading[i]), 3) for i in places],
                wrap=False,
            ),
        ]
    )


def _shown(text: str) -> str:
    """A long number with as many digits as are worth reading; other text as it is."""
    try:
        value = float(text)
    except ValueError:
        return text
    whole = text.strip("-").isdecimal()
    return text if whole or len(text) <= _DIGITS + 2 else f"{value:.{_DIGITS}g}"
