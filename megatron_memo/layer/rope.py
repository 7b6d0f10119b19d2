"""A token chunk's rows of a RoPE table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_memo.layer.rows import Rows
from megatron_memo.ops.packed import is_packed, positions_of


def rope_rows(rope: Any, rows: Rows, packed: Any) -> Any:
    """The rows of `rotary_pos_emb` that a chunk's tokens are turned by, in the chunk's order.

    Args:
        rope: upstream's table [s, 1, 1, d] of this rank's tokens, a (query, key) pair of such, or
            None. For packed sequences it has a row for each position in the longest.
        rows: the chunk in a tensor over the whole sequence.
        packed: upstream's PackedSeqParams, or None.

    Raises:
        ValueError: a packed sequence is longer than the table.
    """
    if isinstance(rope, tuple):
        return tuple(rope_rows(table, rows, packed) for table in rope)
    if rope is None:
        return None
    # Upstream knows a table of all tokens of a pack by its length, and takes it as it is.
    if is_packed(packed) and rope.size(0) != rows.ranks * rows.n:
        return _rows_by_position(rope, rows, packed)
    return table_rows(rope, rows)


def table_rows(table: Tensor, rows: Rows) -> Tensor:
    """The rows of a table [s, 1, 1, d]. Where that is a copy, all layers share it, for the table's
    life."""
    cache = table.__dict__.setdefault("_memo_rows", {})
    if rows.place not in cache:
        cache[rows.place] = rows.take(table)
    return cache[rows.place]


def _rows_by_position(table: Tensor, rows: Rows, packed: Any) -> Tensor:
    """Positions begin again in every sequence. All layers share the copy, for the pack's life."""
    cache = packed.__dict__.setdefault("_memo_rows", {})
    key = (id(table), rows.place)
    if key not in cache:
        positions = positions_of(packed, rows.ranks * rows.n, table.device)
        longest = int(positions.max()) + 1
        if longest > table.size(0):
            raise ValueError(
                f"packed sequences: one has {longest} tokens, and max_seqlen_q says that none has "
                f"more than {table.size(0)}. Give the longest sequence's length."
            )
        # The table is kept with its rows: another one could come to lie at its address.
        cache[key] = table, table.index_select(0, rows.take(positions))
    return cache[key][1]
