"""Shares of a distributed optimizer: which data-parallel ranks update equal pieces."""

from types import SimpleNamespace

import torch

from megatron_memo.compat import optimizer_shares, share_name


def chunk(*sizes, ranks, distributed=True):
    """A model chunk whose one buffer holds parameters of `sizes`, one after the other."""
    index, at = {}, 0
    for size in sizes:
        parameter = torch.nn.Parameter(torch.empty(size, device="meta"))
        index[parameter] = (at, at + size, 0)
        at += size
    bucket = SimpleNamespace(grad_data=torch.empty(at, device="meta"), bucket_id=0, offset=0)
    group = SimpleNamespace(size=lambda: ranks)
    buffer = SimpleNamespace(data_parallel_group=group, buckets=[bucket], param_index_map=index)
    config = SimpleNamespace(use_distributed_optimizer=distributed)
    return SimpleNamespace(ddp_config=config, buffers=[buffer], expert_parallel_buffers=[])


def lengths(shares):
    return [[piece[0] for piece in share] for share in shares]


def test_each_rank_has_the_pieces_in_its_stretch_of_the_buffer():
    assert lengths(optimizer_shares([chunk(6, 2, 4, ranks=3)])) == [[4], [2, 2], [4]]


def test_equal_pieces_have_the_same_name():
    first, middle, last = optimizer_shares([chunk(6, 2, 4, ranks=3)])
    assert share_name(first) == share_name(last) != share_name(middle)


def test_virtual_stages_add_up():
    shares = optimizer_shares([chunk(4, ranks=2), chunk(2, 6, ranks=2)])
    assert lengths(shares) == [[2, 2, 2], [2, 4]]


def test_without_a_distributed_optimizer_all_ranks_do_all():
    shares = optimizer_shares([chunk(4, ranks=2, distributed=False)])
    assert shares == [()] and share_name(shares[0]) == "all"
