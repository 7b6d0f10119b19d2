"""Storage accounting."""

import torch

from megatron_memo.profile.storage import StorageMeter
from megatron_memo.swap.host import HostBlock

KIB = 1024


def kib(n):
    return torch.ones(n * KIB // 4)


def test_views_are_one_storage_and_die_with_the_last():
    with StorageMeter() as meter:
        base = kib(4)
        view = base[10:]
        assert meter.live_bytes == 4 * KIB
        del base
        assert meter.live_bytes == 4 * KIB
        del view
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 4 * KIB


def test_the_peak_is_the_most_at_once():
    with StorageMeter() as meter:
        a = kib(4)
        b = kib(2)
        del a
        c = kib(1)
        assert (meter.live_bytes, meter.peak_bytes) == (3 * KIB, 6 * KIB)
        del b, c


def test_backward_is_counted():
    x = kib(4).requires_grad_()
    with StorageMeter() as meter:
        y = x.exp()  # saved for backward
        y.sum().backward()
        del y
        assert meter.live_bytes == 4 * KIB  # x.grad
    assert meter.peak_bytes >= 8 * KIB


def test_what_was_there_before_is_not_counted():
    before = kib(4)
    with StorageMeter() as meter:
        before.add_(1)
        assert before.view(2, -1).sum().item() == 2 * KIB
        assert meter.live_bytes == 0


def test_ignored_tensors_are_never_counted():
    given = kib(4)
    with StorageMeter(ignore=[given]) as meter:
        assert given.detach() is not None
        assert meter.peak_bytes == 0


def test_host_memory_is_not_device_memory():
    with StorageMeter() as meter:
        block = HostBlock(64 * KIB)
        block.array[:] = 1
    assert meter.peak_bytes == 0
