"""Attention over a sequence that context-parallel ranks share, by trading heads for tokens.

Outside of attention a rank holds all its heads of some tokens; inside it needs all tokens of some
heads, because a head's attention is one computation over the sequence. One all-to-all gets from
the first to the second and one gets back (Ulysses; Megatron's `--cp-comm-type a2a`). Nothing is
computed differently: each head sees the tokens in their order, as on one rank.

Which tokens a rank holds is upstream's choice (`get_batch_on_this_cp_rank`): the sequence is cut
into twice as many pieces as there are ranks, and rank r has the pieces r and 2 * ranks - 1 - r.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class HeadExchange:
    """Trades between the ranks of a context-parallel group.

    Args:
        group: torch's process group, NCCL or gloo.
    """

    def __init__(self, group: Any):
        self._group, self._ranks = group, group.size()
        # Where each piece of the sequence lies among all ranks' pieces, two a rank.
        held = [piece for rank in range(self._ranks) for piece in self._pieces_of(rank)]
        self._places = [held.index(piece) for piece in range(2 * self._ranks)]
        self._held = held

    def _pieces_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self._ranks - 1 - rank

    def to_heads(self, t: Tensor) -> Tensor:
        """[n, b, heads, d] of this rank's n tokens -> [s, b, heads / ranks, d] of all tokens.

        Raises:
            ValueError: heads that do not divide by the ranks, or an odd number of tokens.
        """
        n, b, heads, d = t.shape
        if heads % self._ranks:
            raise ValueError(
                f"{heads} heads cannot be traded between {self._ranks} context-parallel ranks: "
                "their number must divide by that of the ranks"
            )
        if n % 2:
            raise ValueError(f"a context-parallel rank has two equal pieces, and {n} is odd")
        of_rank = t.view(n, b, self._ranks, heads // self._ranks, d).permute(2, 0, 1, 3, 4)
        pieces = self._trade(of_rank.contiguous()).view(2 * self._ranks, n // 2, b, -1, d)
        return torch.cat([pieces[place] for place in self._places])

    def to_tokens(self, t: Tensor) -> Tensor:
        """The way back: [s, b, heads / ranks, d] -> [n, b, heads, d], contiguous."""
        s, b, heads, d = t.shape
        n = s // self._ranks
        pieces = t.reshape(2 * self._ranks, n // 2, b, heads, d)
        of_rank = torch.cat([pieces[piece] for piece in self._held])
        got = self._trade(of_rank.view(self._ranks, n, b, heads, d))
        return got.permute(1, 2, 0, 3, 4).reshape(n, b, self._ranks * heads, d)

    def _trade(self, parts: Tensor) -> Tensor:
        """Part i goes to rank i; what rank i sent comes back in its place."""
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=self._group)
        return got


class NoExchange:
    """A rank that has the whole sequence trades nothing."""

    @staticmethod
    def to_heads(t: Tensor) -> Tensor:
        return t

    @staticmethod
    def to_tokens(t: Tensor) -> Tensor:
        return t
