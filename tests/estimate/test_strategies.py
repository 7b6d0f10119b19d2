"""What a strategy says of a layer: what leaves, what it comes back for, what runs again."""

from dataclasses import replace

import pytest

from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.strategies import Again, FullRecompute, Memo, PaperMemo, Stock


@pytest.fixture
def costs(seven_b):
    return Costs(seven_b, Machine(gpu("a800")))


def told(plan):
    return [(group.name, group.step, group.first, group.last) for group in plan.groups]


def test_memo_s_groups_are_read_where_the_layer_reads_them(costs):
    # Steps: 0 and 1 before attention, 2 attention, 3 and 4 after it; chunk 1 is recomputed.
    plan = Memo(0.5, chunks=2).plan(costs, 1)
    assert told(plan) == [
        ("input", -1, 4, 0),
        ("chunk 0, norm", 0, 0, 0),
        ("chunk 0, q k v", 0, 2, 2),
        ("attention output", 2, 4, 2),
        ("chunk 0, MLP", 3, 3, 3),
    ]
    assert plan.again == {2: (Again("again pre", 0.5),), 4: (Again("again post", 0.5),)}


def test_where_nothing_is_recomputed_the_input_is_read_before_attention_only(costs):
    plan = Memo(1.0, chunks=2).plan(costs, 1)
    assert told(plan)[0] == ("input", -1, 1, 0)
    assert plan.again == {}
    assert sum(group.nbytes for group in plan.groups) == pytest.approx(costs.saved(1).total)


def test_what_leaves_is_the_ratio_s_share_and_what_always_leaves(costs):
    saved = costs.saved(1)
    for ratio in (0.0, 0.25, 0.75):
        nbytes = sum(g.nbytes for g in Memo(ratio, chunks=4).plan(costs, 1).groups)
        assert nbytes == pytest.approx(saved.always + ratio * saved.others, rel=1e-9)
        paper = sum(g.nbytes for g in PaperMemo(ratio).plan(costs, 1).groups)
        assert paper == pytest.approx(nbytes, rel=1e-9)


def test_resident_layers_and_stock_move_nothing(costs):
    for layer in (31, 32):
        assert Memo(0.5).plan(costs, layer).groups == ()
        assert PaperMemo(0.5).plan(costs, layer).groups == ()
    assert Memo(0.5).plan(costs, 30).groups
    assert Stock().plan(costs, 1).groups == FullRecompute().plan(costs, 1).groups == ()


def test_a_prefetch_depth_is_that_of_the_layer_which_has_so_many_chunks(costs):
    job = costs.job
    assert Memo(1.0).of(job).depth is None
    assert Memo(1.0, prefetch="layers").of(job).depth is None
    assert Memo(1.0, chunks=8, prefetch=3).of(job).depth == 3
    assert Memo(1.0, chunks=8, prefetch=1000).of(job).depth == 2 * 17
    # `auto` keeps 2^20 tokens' worth of a layer's steps in flight.
    job = replace(job, sequence=4 * 2**20)
    for chunks in (8, 16):
        one = Memo(1.0, chunks=chunks, prefetch="auto").of(job)
        assert one.depth == (2 * chunks + 1) // 4
    assert Memo(1.0, prefetch="auto").of(job).of(job).prefetch is None
