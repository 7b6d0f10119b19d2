"""What was predicted of a run's swapping, held against what its first iteration did."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_memo import platform
from megatron_memo.layer.footprint import moved_bytes
from megatron_memo.layer.shape import LayerShape
from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.sizes import size_words
from megatron_memo.swap.host_budget import host_need

SWAPPED, HOST = "swapped in an iteration", "host memory"

# From here on a row is marked: the bill that a run starts on was wrong by that much.
_WORTH_MARKING = 0.02


def forecast(
    args: Namespace, layers: Sequence[MemoTransformerLayer], micro_batches: int
) -> dict[str, float]:
    """Bytes of this rank's layers, by what; what cannot be foreseen is left out.

    Args:
        args: Megatron's, validated.
        layers: of this rank.
        micro_batches: of an iteration.
    """
    swapping = [layer for layer in layers if not layer.resident]
    # Transformer Engine's modules save what the list says, but nobody has seen them do so. Of a
    # mixture of experts there is a bound, which a router that prefers some of them passes by.
    if (
        not swapping
        or args.transformer_impl != "local"
        or any(layer.is_moe_layer for layer in swapping)
    ):
        return {}
    shape = LayerShape.from_args(args, on_cuda=not platform.is_active())
    found: dict[str, float] = {
        SWAPPED: sum(moved_bytes(shape, layer.memo) for layer in swapping) * micro_batches
    }
    # Of several stages the fullest one's is known, not each one's; of a disk, not what it spares.
    if args.pipeline_model_parallel_size == 1 and swapping[0].memo.host.nvme_path is None:
        found[HOST] = host_need(args, swapping[0].memo.swap_ratio)
    return found


def table(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Rows of what was predicted and measured, largest of the ranks; a title above them."""
    rows = [("", "predicted", "measured")]
    for name, guess in predicted.items():
        found = measured[name]
        off = abs(found - guess) > _WORTH_MARKING * guess
        rows.append((name, size_words(guess), size_words(found) + (" (off)" if off else "")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "after the first iteration, on the rank that has most:\n" + "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def largest(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By name, over the ranks that have it."""
    names = dict.fromkeys(name for answer in answers for name in answer)
    return {name: max(answer[name] for answer in answers if name in answer) for name in names}
