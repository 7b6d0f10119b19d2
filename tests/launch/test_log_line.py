"""The sentence that says what memo does with each sequence."""

import pytest

from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import describe


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            dict(swap_ratio=0.5),
            "ratio 0.5: 4096 of 8192 tokens swapped, the rest recomputed, in 4 token chunks; the "
            "last 2 of 32 layers stay on the device",
        ),
        (
            dict(swap_ratio=1.0, resident_layers=0),
            "ratio 1: all 8192 tokens swapped, in 4 token chunks; no layer stays on the device",
        ),
        (
            dict(swap_ratio=0.0, chunks=1, resident_layers=1),
            "ratio 0: all 8192 tokens recomputed, in 1 token chunk; the last of 32 layers stays on "
            "the device",
        ),
        (
            dict(swap_ratio=0.25, chunks=1, resident_layers=32),
            "ratio 0.25: 2048 of 8192 tokens swapped, the rest recomputed, in 2 token chunks "
            "(--memo-chunks 1 cannot hold both: swapped and recomputed tokens need a chunk each); "
            "all 32 layers stay on the device, so nothing is swapped or recomputed",
        ),
    ],
)
def test_sentence_is_what_the_chunks_are(settings, sentence):
    assert describe(MemoConfig(**settings), sequence=8192, ranks=2, layers=32) == sentence


def test_tokens_are_rounded_on_each_rank():
    line = describe(MemoConfig(swap_ratio=0.5), sequence=6, ranks=2, layers=4)
    assert line.startswith("ratio 0.5: 4 of 6 tokens swapped")


def test_context_parallel_ranks_cut_their_shares():
    line = describe(MemoConfig(swap_ratio=0.5), sequence=8192, ranks=1, layers=4, cp=4)
    assert line.startswith("ratio 0.5: 4096 of 8192 tokens swapped, the rest recomputed, in 2 ")
