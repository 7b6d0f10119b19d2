"""Several sequences in one row of tokens (upstream's "thd"): none attends to another.

Upstream describes them by the places where they begin and end. Those are needed on the host, since
each sequence is a kernel call of its own here; they are read once for each micro-batch and kept
with its description.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

Bounds = tuple[int, ...]


def is_packed(params: Any) -> bool:
    """Whether upstream's `packed_seq_params` say that the tokens are several sequences."""
    return params is not None and params.qkv_format == "thd"


def bounds_of(params: Any, tokens: int) -> Bounds:
    """Where the sequences begin, and where the last one ends: 0, ..., `tokens`.

    As upstream's RoPE does, padding counts as part of the sequence before it: under a causal mask
    no token before it sees it.

    Args:
        params: upstream's PackedSeqParams of a micro-batch.
        tokens: how many the micro-batch has.

    Raises:
        ValueError: the description does not cover the tokens, is that of cross attention, or of
            sequences that several ranks share.
    """
    kept = params.__dict__.get("_memo_bounds")
    if kept is None:
        kept = params.__dict__["_memo_bounds"] = _read(params)
    if kept[0] != 0 or kept[-1] != tokens or any(a > b for a, b in pairwise(kept)):
        raise ValueError(
            f"packed sequences: their bounds go from {kept[0]} to {kept[-1]}, and the micro-batch "
            f"has {tokens} tokens. Give bounds that rise from 0 to {tokens}."
        )
    return kept


def _read(params: Any) -> Bounds:
    if params.local_cp_size is not None or params.cp_group is not None:
        raise ValueError(
            "packed sequences: these are split over context-parallel ranks by themselves, which "
            "memo does not support. Drop --hybrid-context-parallel."
        )
    ends = [
        plain if padded is None else padded
        for plain, padded in (
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        )
    ]
    if ends[0] is not ends[1] and not torch.equal(ends[0], ends[1]):
        raise ValueError(
            "packed sequences: queries and keys are cut at different places, which is cross "
            "attention; memo supports self attention only."
        )
    return tuple(ends[0].tolist())


def positions_of(params: Any, tokens: int, device: torch.device) -> Tensor:
    """Each token's place in its own sequence: [tokens] int64. Kept for the micro-batch's life."""
    if "_memo_positions" not in params.__dict__:
        places = [torch.arange(b - a) for a, b in pairwise(bounds_of(params, tokens))]
        params.__dict__["_memo_positions"] = torch.cat(places).to(device)
    return params.__dict__["_memo_positions"]


class PackedKernel:
    """An attention kernel that is called for one sequence after the other.

    Takes and gives what the kernel does (see `ops.flash_attention`): tensors [1, heads, t, d], and
    first among the kernel's extra results the log-sum-exp, whose last dimension is over tokens.
    Serves one forward and its backward.

    Args:
        kernel: works on one sequence.
        bounds: see `bounds_of`.
    """

    def __init__(self, kernel: Any, bounds: Bounds):
        self._kernel = kernel
        self._spans = [slice(a, b) for a, b in pairwise(bounds) if a < b]
        self._lse_ends: list[int] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *call: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, extras = _by_tokens(q), []
        for span in self._spans:
            part, extra = self._kernel.forward(*(t[:, :, span] for t in (q, k, v)), *call)
            out[:, :, span].copy_(part)
            extras.append(extra)
        # One tensor for all log-sum-exps: a thousand small ones would each stay on the device.
        lses = [extra[0] for extra in extras]
        self._lse_ends = list(accumulate((lse.size(-1) for lse in lses), initial=0))
        rest = tuple(t for extra in extras for t in extra[1:])
        return out, (torch.cat(lses, dim=-1), *rest)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Any, *call: Any
    ) -> tuple[Tensor, ...]:
        lse, *rest = extra
        each = len(rest) // len(self._spans)
        grads = tuple(_by_tokens(t) for t in (q, k, v))
        for i, (span, ends) in enumerate(zip(self._spans, pairwise(self._lse_ends), strict=True)):
            parts = self._kernel.backward(
                *(t[:, :, span] for t in (grad, q, k, v, out)),
                (lse[..., slice(*ends)].contiguous(), *rest[i * each : (i + 1) * each]),
                *call,
            )
            for whole, part in zip(grads, parts, strict=True):
                whole[:, :, span].copy_(part)
        return grads


def _by_tokens(like: Tensor) -> Tensor:
    """[1, heads, t, d], of memory in which a token's heads lie together."""
    b, heads, t, d = like.shape
    return like.new_empty(t, b, heads, d).permute(1, 2, 0, 3)
