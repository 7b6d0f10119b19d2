"""Mistakes in how sequences are shared between ranks, cut into chunks or packed together."""

from __future__ import annotations

import argparse
import math

from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import layer_tokens, plan_chunks


def check_sequences(args: argparse.Namespace, memo: MemoConfig | None, own_modules: bool) -> None:
    """Ranks can share the sequences that the flags describe, and chunks can be cut from them.

    Args:
        args: parsed arguments, validated by Megatron or not yet.
        memo: None without a swap ratio.
        own_modules: memo's norm and attention are used.

    Raises:
        ValueError: flag, value, limit and remedy of the first mistake.
    """
    _check_tokens(args, memo)
    if memo is not None or own_modules:
        _check_heads(args)
        _check_pack(args)


def _check_tokens(args: argparse.Namespace, memo: MemoConfig | None) -> None:
    tokens = getattr(args, "seq_length", None)
    if tokens is None:
        return
    tp = (getattr(args, "tensor_model_parallel_size", None) or 1) if args.sequence_parallel else 1
    cp = getattr(args, "context_parallel_size", None) or 1
    if cp > 1:
        _check_context(tokens, tp, cp)
    elif tokens % tp:
        raise ValueError(
            f"--seq-length {tokens}: does not divide by --tensor-model-parallel-size {tp}, over "
            f"which --sequence-parallel splits it. Use a multiple of {tp}, such as "
            f"{(tokens // tp + 1) * tp}, or drop --sequence-parallel."
        )
    if memo is not None:
        plan_chunks(memo, layer_tokens(args) // (tp * cp), tp, keep=False)


def _check_context(tokens: int, tp: int, cp: int) -> None:
    """Megatron gives each context-parallel rank two pieces, which its tp ranks share."""
    multiple = math.lcm(2 * cp, tp * cp)
    if tokens % multiple:
        shared = f", and its tp ranks share those (tp {tp})" if tp > 1 else ""
        raise ValueError(
            f"--seq-length {tokens}: does not divide by {multiple}: --context-parallel-size {cp} "
            f"gives each rank two equal pieces{shared}. Use a multiple of {multiple}, such as "
            f"{(tokens // multiple + 1) * multiple}."
        )


def _check_heads(args: argparse.Namespace) -> None:
    """Memo's own attention gives each context-parallel rank as many heads as any other."""
    cp = getattr(args, "context_parallel_size", None) or 1
    heads = getattr(args, "num_attention_heads", None)
    if cp == 1 or heads is None or args.transformer_impl == "transformer_engine":
        return
    flag = "--num-attention-heads"
    if getattr(args, "group_query_attention", False):
        flag, heads = "--num-query-groups", args.num_query_groups
    tp = getattr(args, "tensor_model_parallel_size", None) or 1
    of_rank = max(heads // tp, 1)
    if of_rank % cp:
        fits = [n for n in range(1, of_rank + 1) if of_rank % n == 0]
        raise ValueError(
            f"--context-parallel-size {cp}: memo's own attention trades heads for tokens, and "
            f"{flag} {heads} over --tensor-model-parallel-size {tp} are {of_rank} a rank, which "
            f"{cp} does not divide. Give one of {', '.join(map(str, fits))}, or use "
            "--transformer-impl transformer_engine."
        )


def _check_pack(args: argparse.Namespace) -> None:
    """Megatron makes one row of a micro-batch of packed samples, and its pipeline expects rows."""
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    batch = getattr(args, "micro_batch_size", None) or 1
    if stages == 1 or batch == 1:
        return
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            raise ValueError(
                f"--micro-batch-size {batch}: --{name.replace('_', '-')} joins the samples of a "
                "micro-batch to one row of tokens, which Megatron's pipeline stages cannot hand "
                "on. Give --micro-batch-size 1, with a longer --seq-length for as many tokens."
            )
