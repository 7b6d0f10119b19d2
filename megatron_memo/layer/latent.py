"""Multi-latent attention: it rotates queries and keys by itself, from position 0 on.

A token chunk's rows stand at other positions. So its own table of rotations gives way to the rows
of it that belong to the chunk; the rest is upstream's code, as in other attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from megatron_memo.layer.rope import table_rows
from megatron_memo.layer.rows import Rows

# What upstream's `rotary_pos_emb` gives: a table, or with YaRN a table and a factor.
Rope = Any


def latent_rope_rows(attention: MultiLatentAttention, rows: Rows) -> Rope:
    """What the attention's own `rotary_pos_emb` gives for the whole sequence, cut to `rows`.

    Tables are [s, 1, 1, d], and upstream keeps them for as long as the module lives.
    """
    whole = attention.rotary_pos_emb(rows.ranks * rows.n)
    if isinstance(whole, Tensor):
        return table_rows(whole, rows)
    table, factor = whole
    return table_rows(table, rows), factor


class _Given(nn.Module):
    """Stands for `rotary_pos_emb`, with an answer that is known already."""

    def __init__(self, rope: Rope):
        super().__init__()
        self._rope = rope

    def get_rotary_seq_len(self, *_args: Any, **_kwargs: Any) -> None:
        """Nobody reads it: the answer is known."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Rope:
        return self._rope


@contextmanager
def latent_rope(attention: MultiLatentAttention, rope: Rope) -> Iterator[None]:
    """While the body runs, the attention's tables are `rope`."""
    real = attention._modules["rotary_pos_emb"]
    attention._modules["rotary_pos_emb"] = _Given(rope)
    try:
        yield
    finally:
        attention._modules["rotary_pos_emb"] = real
