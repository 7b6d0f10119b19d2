"""q, k and v of a sequence come back from host memory straight into their rows."""

import pytest
import torch

from megatron_memo.layer.attention import QkvStore
from megatron_memo.layer.chunks import Chunk, Fate
from megatron_memo.layer.rows import Rows
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine
from megatron_memo.swap.group import Place

N, WIDTH = 6, 3
CUTS = ((0, 2), (2, 3), (3, N))
ATTENTION = 3  # the step


class Recomputed:
    """Stands for the segment of a chunk that was dropped."""

    def __init__(self, parts):
        self.parts = parts

    def take_outputs(self):
        return self.parts


class Counting(HostThreadBackend):
    """Counts the device memory that is asked for to come back into."""

    buffers = 0

    def device_buffer(self, nbytes, device):
        self.buffers += nbytes
        return super().device_buffer(nbytes, device)


@pytest.fixture
def context():
    engine = SwapEngine(Counting(), poison=True)
    return engine.begin_layer(first=True, swaps=True, device=torch.device("cpu")).own


def stored(context, ranks, fates, pieces_of=lambda parts: parts):
    """A store of three whole tensors in three chunks, and the tensors."""
    whole = tuple(torch.randn(ranks * N, 2, WIDTH + i) for i in range(3))
    store = QkvStore(context, ATTENTION)
    for (start, stop), fate in zip(CUTS, fates, strict=True):
        rows = Rows(ranks, N, start, stop)
        parts = pieces_of(tuple(rows.take(t).clone() for t in whole))
        store.add(Chunk(start, stop, fate), rows, Recomputed(parts), parts)
        context.step += 1
    store.describe(whole)
    return store, whole


def taken(store):
    return [store.take(i) for i in range(3)]


SWAP, RECOMPUTE = Fate.SWAP, Fate.RECOMPUTE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fates", [(SWAP,) * 3, (SWAP, SWAP, RECOMPUTE), (RECOMPUTE,) * 3])
@pytest.mark.parametrize("retired", [0, 1, 2, 3])
@pytest.mark.parametrize("early", [True, False])
def test_the_whole_is_put_together_bitwise(context, ranks, fates, retired, early):
    store, whole = stored(context, ranks, fates)
    context.retire(context.groups()[:retired])
    if early:
        context.fetch_first_read_in(ATTENTION)
    assert all(map(torch.equal, taken(store), whole))


def test_nothing_is_copied_twice_on_the_device(context):
    store, whole = stored(context, 1, (SWAP,) * 3)
    context.retire()
    context.fetch_first_read_in(ATTENTION)
    got = taken(store)
    assert context.engine.backend.buffers == sum(t.numel() * 4 for t in whole)
    assert all(map(torch.equal, got, whole))


@pytest.mark.parametrize("fates", [(SWAP,) * 3, (SWAP, RECOMPUTE, RECOMPUTE)])
def test_what_is_taken_twice_comes_a_second_time(context, fates):
    store, whole = stored(context, 2, fates)
    context.retire()
    context.fetch_first_read_in(ATTENTION)
    first = taken(store)
    assert torch.equal(store.take(0), whole[0])  # q once more, of a second assembly
    assert torch.equal(store.take(0), whole[0])  # and of a third
    assert all(map(torch.equal, first, whole))


def test_what_shares_a_storage_with_others_comes_back_right_as_well(context):
    """q and k are pieces of one storage with what the chunk's own step put before."""

    def sharing(parts):
        both = torch.cat([parts[0].flatten(), parts[1].flatten()])
        context.put(both)
        q, k = both.split([parts[0].numel(), parts[1].numel()])
        return q.view_as(parts[0]), k.view_as(parts[1]), parts[2]

    store, whole = stored(context, 1, (SWAP,) * 3, sharing)
    context.retire()
    assert all(map(torch.equal, taken(store), whole))


def test_the_memory_stays_until_the_last_chunk_has_come(context):
    """A copy that nobody waited for is waited for before its memory is anybody's."""
    store, _ = stored(context, 1, (SWAP,) * 3)
    context.retire()
    context.fetch_first_read_in(ATTENTION)
    first, *others = context.groups()
    assert store._whole.complete
    context.let_go(first)
    assert store._whole.complete
    for group in others:
        context.let_go(group)
    assert not store._whole.complete
    assert {group.place for group in context.groups()} == {Place.HOST}


def test_a_landed_tensor_can_be_asked_for_by_itself(context):
    """An attention kernel may save a view of q that is not known for q."""
    store, whole = stored(context, 2, (SWAP,) * 3)
    handle = store._parts[1].handles[1]
    context.retire()
    context.fetch_first_read_in(ATTENTION)
    rows = Rows(2, N, *CUTS[1])
    assert torch.equal(context.get(handle), rows.take(whole[1]))
    assert all(map(torch.equal, taken(store), whole))
