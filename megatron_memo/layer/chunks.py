"""Policy: how a rank's tokens are cut into chunks, and what happens to each chunk."""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from megatron_memo.config import MemoConfig

# Chosen chunks hold about this many tokens of the whole sequence: GEMMs of this height run at full
# rate, and eight chunks already take most of what chunking can take off the peak.
CHUNK_TOKENS = 2048
MOST_CHOSEN_CHUNKS = 8


class Fate(Enum):
    """What happens to a chunk's saved activations between forward and backward."""

    SWAP = "swap"  # to host memory and back
    RECOMPUTE = "recompute"  # dropped, computed again before backward
    KEEP = "keep"  # stay on the device


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of a rank's own tokens."""

    start: int
    stop: int
    fate: Fate


def plan_chunks(memo: MemoConfig, local_tokens: int, tp: int, *, keep: bool) -> tuple[Chunk, ...]:
    """Cuts a sequence at alpha, then each side into equal chunks.

    Args:
        memo: ratio and number of chunks.
        local_tokens: rows of this rank's layer input: s/tp under sequence parallelism, else s.
        tp: ranks that share the sequence (1 without sequence parallelism); only for choosing.
        keep: every chunk stays on the device (resident layers; nothing is saved in evaluation).

    Returns:
        Chunks in order, covering all rows. Rows below round(alpha * local_tokens) are swapped.

    Raises:
        ValueError: more chunks than rows.
    """
    count = memo.chunks or chosen_chunks(local_tokens * tp)
    if count > local_tokens:
        raise ValueError(
            f"--memo-chunks {count}: more than the {local_tokens} tokens that a rank's layer works "
            f"on (sequence length over tensor- and context-parallel sizes). Give at most "
            f"{local_tokens}."
        )
    head_rows = swapped_rows(memo.swap_ratio, local_tokens)
    tail_rows = local_tokens - head_rows
    if head_rows and tail_rows:
        count = max(count, 2)  # at least one on each side of alpha
        head_count = min(max(round(count * memo.swap_ratio), 1), count - 1)
        head_count = min(max(head_count, count - tail_rows), head_rows)
    else:
        head_count = count if head_rows else 0
    cuts = [*_cuts(0, head_rows, head_count), *_cuts(head_rows, local_tokens, count - head_count)]
    return tuple(
        Chunk(
            start,
            stop,
            Fate.KEEP if keep else (Fate.SWAP if stop <= head_rows else Fate.RECOMPUTE),
        )
        for start, stop in cuts
    )


def describe(memo: MemoConfig, sequence: int, ranks: int, layers: int, cp: int = 1) -> str:
    """What memo does with each sequence, for the log.

    Args:
        memo: ratio, chunks, resident layers.
        sequence: tokens of a sequence.
        ranks: tensor-parallel ranks that share it (1 without sequence parallelism).
        layers: layers of the model.
        cp: context-parallel ranks that share it.

    Raises:
        ValueError: see `plan_chunks`.
    """
    chunks = plan_chunks(memo, sequence // (ranks * cp), ranks, keep=False)
    count = f"{len(chunks)} token chunk{'s' if len(chunks) > 1 else ''}"
    if memo.chunks is not None and len(chunks) > memo.chunks:
        count += (
            f" (--memo-chunks {memo.chunks} cannot hold both: swapped and recomputed tokens need "
            "a chunk each)"
        )
    swapped = sum(chunk.stop - chunk.start for chunk in chunks if chunk.fate is Fate.SWAP)
    swapped *= ranks * cp
    if swapped == sequence:
        tokens = f"all {sequence} tokens swapped"
    elif swapped == 0:
        tokens = f"all {sequence} tokens recomputed"
    else:
        tokens = f"{swapped} of {sequence} tokens swapped, the rest recomputed"
    resident = min(memo.resident_layers, layers)
    if resident == 0:
        staying = "no layer stays on the device"
    elif resident == layers:
        staying = f"all {layers} layers stay on the device, so nothing is swapped or recomputed"
    elif resident == 1:
        staying = f"the last of {layers} layers stays on the device"
    else:
        staying = f"the last {resident} of {layers} layers stay on the device"
    return f"ratio {memo.swap_ratio:g}: {tokens}, in {count}; {staying}"


def layer_tokens(args: Any) -> int:
    """Tokens in a row that a layer works on, on all ranks that share them: a sequence, or a whole
    micro-batch where its sequences are packed.

    Args:
        args: Megatron's.
    """
    samples = (getattr(args, "micro_batch_size", None) or 1) if packs(args) else 1
    return args.seq_length * samples


def packs(args: Any) -> bool:
    """Whether Megatron's arguments say that samples are packed sequences."""
    flags = ("sft", "dataloader_inter_document_masking")
    return any(getattr(args, flag, False) for flag in flags)


def swapped_rows(swap_ratio: float, local_tokens: int) -> int:
    """Rows whose activations are swapped: alpha times the rows, to the nearest."""
    return round(swap_ratio * local_tokens)


def chosen_chunks(sequence_tokens: int) -> int:
    """How many chunks are used where `--memo-chunks` is not given."""
    return min(max(sequence_tokens // CHUNK_TOKENS, 1), MOST_CHOSEN_CHUNKS)


def _cuts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) in `count` pieces whose lengths differ by at most one."""
    edges = [start + (stop - start) * i // count for i in range(count + 1)] if count else []
    return list(pairwise(edges))
