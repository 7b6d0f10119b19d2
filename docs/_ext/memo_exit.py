"""What exit statuses mean, from the table that the commands use."""

from __future__ import annotations

from megatron_memo.exit_status import MEANING
from memo_text import prose, table


def statuses() -> str:
    """Markdown of every status."""
    rows = [[str(int(status)), prose(meaning)] for status, meaning in MEANING.items()]
    return table(["status", "what it means"], rows, [12, 88])
