"""The page of what composes: the table of refusals, and what works with the tests that show it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_memo.refusals import REFUSALS, Refusal, Scope
from memo_faults import FAULTS
from memo_text import prose, table
from memo_works import WORKS, Works

_SECTIONS = (
    (
        "With a swap ratio",
        "These flags are refused where `--memo-swap-ratio` is given.",
        Scope.LAYER,
    ),
    (
        "With memo's own norm and attention",
        "These are limits of memo's own modules. They hold with or without a ratio wherever those "
        "stand in, and not with `--transformer-impl transformer_engine`.",
        Scope.ATTENTION,
    ),
    ("With either", "These are refused with a ratio, and with memo's own modules.", Scope.EITHER),
)


def refusals() -> str:
    """Markdown of all refused flags, by what cannot work with them."""
    parts = []
    for title, sentence, scope in _SECTIONS:
        rows = [_row(row) for row in REFUSALS if row.scope is scope]
        parts.append(f"**{title}.** {sentence}")
        parts.append(table(["refused", "because it", "instead"], rows, [28, 40, 32]))
    return "\n\n".join(parts)


def works() -> str:
    """Markdown of what works together, with the tests."""
    return _shown(WORKS, "works", "how")


def faults() -> str:
    """Markdown of what goes wrong elsewhere, what holds it here, and the tests."""
    return _shown(FAULTS, "what goes wrong", "what holds it here")


def _shown(rows: Sequence[Works], what: str, how: str) -> str:
    cells = [
        [row.what, row.how, "\n".join(f"`{test}`\n" for test in row.tests).rstrip()] for row in rows
    ]
    return table([what, how, "shown by"], cells, [26, 34, 40])


def _row(row: Refusal) -> list[str]:
    flag = f"`{row.flag}`"
    if row.example and row.example != row.flag and not row.example.startswith("--encoder"):
        flag = f"`{row.example}`"
    reason = prose(row.reason) + (" (on a machine without a GPU)" if row.on_cpu_only else "")
    return [flag, reason, prose(row.remedy)]
