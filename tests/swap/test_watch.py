"""Who listens hears of each batch of copies, and costs nothing afterwards."""

import time

import pytest
import torch

from megatron_memo.swap import watch
from megatron_memo.swap.backend import Copy
from megatron_memo.swap.cpu import HostThreadBackend


@pytest.fixture
def backend():
    return HostThreadBackend()


def copies(backend):
    block = backend.new_host_block(1 << 12)
    halves = torch.ones(1 << 12, dtype=torch.uint8).split(1 << 11)
    return [Copy(half, block, k << 11) for k, half in enumerate(halves)]


def test_both_directions_are_told_with_their_bytes_and_times(backend):
    heard, start = [], time.perf_counter()
    batch = copies(backend)
    with watch.listening(lambda *told: heard.append(told)):
        done = backend.d2h(batch, after=None)
        backend.h2d(batch, after=done).synchronize()
    ended = time.perf_counter()
    assert [(way, nbytes) for way, _, _, nbytes in heard] == [("D2H", 1 << 12), ("H2D", 1 << 12)]
    (_, out, out_end, _), (_, back, back_end, _) = heard
    assert start <= out <= out_end <= back <= back_end <= ended


def test_nobody_hears_of_later_copies(backend):
    heard = []
    with watch.listening(lambda *told: heard.append(told)):
        pass
    backend.d2h(copies(backend), after=None).synchronize()
    assert heard == []
