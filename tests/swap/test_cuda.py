"""The CUDA backend on a GPU. Not yet seen on hardware: skipped wherever there is none."""

import pytest
import torch

from megatron_memo.swap.engine import SwapEngine

pytestmark = pytest.mark.gpu


@pytest.fixture
def engine():
    from megatron_memo.swap.cuda import CudaStreamBackend

    return SwapEngine(CudaStreamBackend(), poison=True)


def busy():
    """Keeps the compute stream behind the copies that are enqueued meanwhile."""
    torch.cuda._sleep(50_000_000)


def test_values_come_back_bitwise_while_compute_is_late(engine):
    device = torch.device("cuda", torch.cuda.current_device())
    contexts, expected = [], []
    for layer in range(6):
        busy()
        t = torch.randn(1 << 22, device=device)
        expected.append(t.clone())
        context = engine.begin_layer(first=layer == 0, swaps=True, device=device).own
        contexts.append((context, context.put(t)))
        context.flush()
        del t
    for context, _ in contexts:
        context.retire()
    for (context, handle), values in zip(reversed(contexts), reversed(expected), strict=True):
        busy()
        context.prefetch()
        assert torch.equal(context.get(handle), values)
        context.release()


def test_device_memory_is_given_up_when_a_layer_is_retired(engine):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    context.put(torch.randn(1 << 22, device=device))
    context.flush()
    assert torch.cuda.memory_allocated() >= before + (1 << 24)
    context.retire()
    assert torch.cuda.memory_allocated() == before
