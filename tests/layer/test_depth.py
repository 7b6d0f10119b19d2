"""How many of a layer's steps stay in flight."""

import pytest

from megatron_memo.config import MemoConfig
from megatron_memo.layer.depth import WINDOW_TOKENS, Steps, prefetch_steps


def depth_of(given, chunks=8, tokens=WINDOW_TOKENS):
    return prefetch_steps(MemoConfig(1.0, prefetch_depth=given), Steps(chunks), tokens)


def test_steps_are_numbered_in_the_order_of_forward():
    steps = Steps(3)
    pre, post = [steps.pre(i) for i in range(3)], [steps.post(i) for i in range(3)]
    assert [*pre, steps.attention, *post] == list(range(steps.count))
    assert steps.last_chunk == steps.count - 1
    assert Steps(3, experts=True).count == steps.count + 1


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_auto_is_what_lies_between_two_attentions(chunks):
    assert depth_of("auto", chunks) == depth_of("auto", chunks, tokens=100) == 2 * chunks + 1


def test_auto_keeps_the_bytes_in_flight_constant_for_longer_sequences():
    for chunks in (1, 4, 8, 64):
        for factor in (1, 2, 4, 8, 1000):
            tokens = factor * WINDOW_TOKENS
            bytes_in_flight = depth_of("auto", chunks, tokens) / (2 * chunks + 1) * tokens
            one_step = tokens / (2 * chunks + 1)
            assert bytes_in_flight <= max(WINDOW_TOKENS, one_step)
            assert depth_of("auto", chunks, tokens) >= 1


def test_two_layers_are_the_most_that_is_in_flight():
    assert [depth_of(n, chunks=2) for n in (1, 7, 10, 11, 1000)] == [1, 7, 10, 10, 10]
    assert depth_of("layers") is None
