"""One layer's tensors: what is moved, what is shared, what comes back, what is given up."""

import gc
import time
import weakref

import pytest
import torch

from megatron_memo.config import MemoConfig
from megatron_memo.swap.backend import Copy
from megatron_memo.swap.cpu import HostThreadBackend, ThreadEvent
from megatron_memo.swap.engine import SwapEngine, get_engine, set_engine
from megatron_memo.swap.group import Place
from megatron_memo.swap.host import HostBlock, HostPool


@pytest.fixture
def engine():
    return SwapEngine(HostThreadBackend(), poison=True)


def new_context(engine, first=True):
    return engine.begin_layer(first=first, swaps=True, device=torch.device("cpu")).own


def place(context):
    (group,) = context.groups()
    return group.place


def there_and_back(engine, *tensors):
    context = new_context(engine)
    handles = [context.put(t) for t in tensors]
    context.flush()
    context.retire()
    context.prefetch()
    return context, handles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_values_come_back_bitwise(engine, dtype):
    original = (torch.randn(33, 7) * 10).to(dtype)
    kept = original.clone()
    context, (handle,) = there_and_back(engine, original)
    assert torch.equal(context.get(handle), kept)


def test_views_of_one_storage_travel_once_and_keep_their_layout(engine):
    base = torch.randn(8, 6)
    views = [base, base.t(), base[:, ::2], base[2:]]
    kept = [v.clone() for v in views]
    context, handles = there_and_back(engine, *views)
    assert engine.stats()["d2h_bytes"] == base.numel() * 4
    for handle, view, values in zip(handles, views, kept, strict=True):
        got = context.get(handle)
        assert torch.equal(got, values)
        assert got.stride() == view.stride()


def test_a_small_view_does_not_drag_its_storage_along(engine):
    base = torch.randn(100, 10)
    piece = base[:3]
    kept = piece.clone()
    context, (handle,) = there_and_back(engine, piece)
    assert engine.stats()["d2h_bytes"] == piece.numel() * 4
    assert torch.equal(context.get(handle), kept)


def test_pieces_that_make_up_a_storage_are_put_as_one(engine):
    base = torch.randn(4, 9)
    pieces = list(base.split(3, dim=1))
    kept = [p.clone() for p in pieces]
    context = new_context(engine)
    handles = context.put_all(pieces)
    context.flush()
    context.retire()
    assert engine.stats()["d2h_bytes"] == base.numel() * 4
    for handle, values in zip(handles, kept, strict=True):
        assert torch.equal(context.get(handle), values)


def test_before_it_is_retired_a_context_gives_the_forwards_own_tensors(engine):
    original = torch.randn(100)
    context = new_context(engine)
    handle = context.put(original)
    context.flush()
    context.prefetch()
    assert context.get(handle).data_ptr() == original.data_ptr()
    assert engine.stats()["h2d_bytes"] == 0


def test_retiring_gives_up_the_device_memory(engine):
    original = torch.randn(1000)
    storage = weakref.ref(original.untyped_storage())
    context = new_context(engine)
    context.put(original)
    context.flush()
    del original
    assert storage() is not None
    context.retire()
    assert storage() is None


def test_retired_memory_that_is_used_again_is_not_taken_for_what_it_held(engine):
    memory = torch.full((1000,), 1.0)
    context = new_context(engine)
    handles = []
    for value in (1.0, 2.0):
        memory.fill_(value)
        handles.append(context.put(memory))
        context.flush()
        context.retire()
    assert [context.get(handle).unique().tolist() for handle in handles] == [[1.0], [2.0]]


def test_retired_memory_that_somebody_else_holds_is_not_poisoned(engine):
    original = torch.randn(1000)
    kept = original.clone()
    there_and_back(engine, original)
    assert torch.equal(original, kept)


def test_a_layer_is_retired_when_the_second_one_after_it_begins(engine):
    contexts = []
    for i in range(4):
        context = new_context(engine, first=i == 0)
        context.put(torch.randn(100))
        context.flush()
        contexts.append(context)
    assert [place(c) for c in contexts] == [Place.HOST] * 2 + [Place.SOURCE] * 2


def test_layers_that_keep_count_as_layers_in_flight(engine):
    context = new_context(engine)
    context.put(torch.randn(100))
    context.flush()
    for _ in range(2):
        engine.begin_layer(first=False, swaps=False, device=torch.device("cpu"))
    assert place(context) is Place.HOST


def test_the_backward_of_a_layer_fetches_the_one_below(engine):
    below = engine.begin_layer(first=True, swaps=True, device=torch.device("cpu"))
    below.own.put(torch.randn(100))
    below.own.flush()
    for _ in range(2):
        resident = engine.begin_layer(first=False, swaps=False, device=torch.device("cpu"))
    resident.begin_backward()
    assert place(below.own) is Place.BUFFER


def test_the_next_pass_does_not_reach_into_the_last_one(engine):
    new_context(engine)
    first_of_next = engine.begin_layer(first=True, swaps=True, device=torch.device("cpu"))
    first_of_next.begin_backward()  # would prefetch the last pass's layer if it were chained
    assert first_of_next.below is None


def test_host_memory_is_exact_and_reused(engine):
    for _ in range(5):
        context, _ = there_and_back(engine, torch.randn(1000), torch.randn(300))
        context.release()
    # Two storages of 4000 and 1200 bytes, each rounded up to 256.
    assert engine.stats()["host_bytes"] == 4096 + 1280


def test_a_context_dropped_without_backward_gives_its_memory_back(engine):
    for fetched in (False, True):
        context = new_context(engine)
        context.put(torch.randn(1000))
        context.flush()
        if fetched:
            context.retire()
            context.prefetch()
        dropped = weakref.ref(context)
        del context
        for _ in range(3):  # out of the layers in flight, then released by the next one
            engine.begin_layer(first=True, swaps=False, device=torch.device("cpu"))
        gc.collect()
        assert dropped() is None
    assert engine.stats()["host_bytes"] == 4096


def test_reading_after_the_end_is_an_error(engine):
    context, (handle,) = there_and_back(engine, torch.randn(100))
    context.release()
    with pytest.raises(RuntimeError, match="run only once"):
        context.get(handle)


def test_an_error_in_a_copy_reaches_the_training_thread(engine):
    context = new_context(engine)
    context.put(torch.randn(100))
    context.flush()
    host = context.groups()[0].host
    bad = Copy(torch.empty(10, dtype=torch.uint8), host, host.nbytes)  # outside of the block
    event = engine.backend.d2h([bad], after=None)
    with pytest.raises(RuntimeError, match="activation copy failed"):
        event.synchronize()


def test_no_host_memory_is_an_error_that_says_what_to_do_and_leaves_all_as_it_was(engine):
    def none_left(nbytes):
        raise OSError("cannot allocate memory")

    context = new_context(engine)
    kept = torch.randn(1000)
    handle = context.put(kept.clone())
    take_block, engine.host._new_block = engine.host._new_block, none_left
    with pytest.raises(MemoryError, match="--memo-swap-ratio"):
        context.flush()
    engine.host._new_block = take_block
    context.flush()  # nothing was lost
    context.retire()
    assert torch.equal(context.get(handle), kept)


def test_host_memory_does_not_grow_with_the_number_of_different_sizes():
    pool = HostPool(HostBlock, quiesce=lambda: None)
    for size in range(4096, 4096 * 40, 4096):
        blocks = [pool.take(size) for _ in range(3)]
        assert pool.total_bytes <= 4 * size  # a block to spare, until they are all idle again
        for block in blocks:
            pool.give_back(block)
    pool.give_up_idle()
    assert pool.total_bytes == 0


def test_a_block_is_closed_only_after_every_copy_is_done():
    order = []

    class Block(HostBlock):
        def close(self):
            order.append("closed")

    pool = HostPool(Block, quiesce=lambda: order.append("copies done"))
    pool.give_back(pool.take(4096))
    pool.take(8192)
    assert order == ["copies done", "closed"]


def test_a_context_that_is_collected_on_a_copy_thread_does_not_make_it_wait_for_itself(engine):
    context = new_context(engine)
    context.put(torch.randn(1000))
    context.flush()
    engine._in_flight.clear()
    held = [context]
    del context
    done = engine.backend._d2h.submit(held.clear, after=None)
    assert done._done.wait(timeout=30), "the copy thread waits for itself"
    assert not held
    new_context(engine)
    assert engine.host.taken == 0  # released by the next layer


def test_what_a_source_held_may_not_change_before_backward_reads_it(engine):
    original = torch.randn(100)
    context = new_context(engine)
    handle = context.put(original)
    context.flush()
    original.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        context.get(handle)


class Logged(HostThreadBackend):
    def __init__(self):
        super().__init__()
        self.log = []

    def record_compute(self):
        self.log.append("record")
        return super().record_compute()

    def d2h(self, copies, after):
        self.log.append("d2h")
        return super().d2h(copies, after)

    def h2d(self, copies, after):
        self.log.append("h2d")
        return super().h2d(copies, after)

    def waited_seconds(self):
        return None

    def device_buffer(self, nbytes, device):
        self.log.append("buffer")
        return super().device_buffer(nbytes, device)


def test_compute_is_recorded_after_the_tensor_and_after_the_buffer_were_made():
    """Waits 1 and 3 wait for a point that is late enough: nothing older is used again."""
    engine = SwapEngine(Logged())
    for _ in range(2):
        there_and_back(engine, torch.randn(100))
    assert engine.backend.log == ["record", "d2h", "buffer", "record", "h2d"] * 2


def test_bytes_over_busy_seconds_is_what_the_copies_reached():
    class Slow(HostThreadBackend):
        def d2h(self, copies, after):
            return self._d2h.submit(lambda: time.sleep(0.05), after)

    engine = SwapEngine(Slow())
    started = time.perf_counter()
    context, (handle,) = there_and_back(engine, torch.randn(1000))
    context.get(handle)
    elapsed = time.perf_counter() - started
    stats = engine.stats()
    assert 0.05 <= stats["d2h_busy_s"] <= elapsed
    assert 0 < stats["h2d_busy_s"] <= elapsed - 0.05
    engine.reset_interval()
    assert engine.stats()["d2h_busy_s"] == engine.stats()["h2d_busy_s"] == 0


def test_waiting_for_what_a_copy_comes_after_is_not_copying():
    backend = HostThreadBackend()
    gate = ThreadEvent()
    done = backend.h2d([], after=gate)
    time.sleep(0.3)  # much longer than a busy machine lets the copy thread wait for a core
    gate.finish(None)
    done.synchronize()
    assert backend.busy_seconds()[1] < 0.3


def test_waiting_that_a_backend_cannot_see_is_not_reported_as_none_at_all():
    assert SwapEngine(Logged()).stats()["exposed_h2d_s"] is None


def test_an_engine_that_was_set_is_used_whatever_the_settings():
    mine = SwapEngine(HostThreadBackend())
    set_engine(mine)
    try:
        assert get_engine(MemoConfig(0.5, poison=True)) is mine
        assert get_engine() is mine
    finally:
        set_engine(None)
    assert get_engine(MemoConfig(0.5)) is not mine
    set_engine(None)


class SlowH2D(HostThreadBackend):
    """H2D copies run when the test says so; a released buffer's memory is handed out again."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(4096, dtype=torch.uint8)
        self.waiting = []

    def device_buffer(self, nbytes, device):
        return self.memory[:nbytes]

    def h2d(self, copies, after):
        event = ThreadEvent()
        self.waiting.append((copies, event))
        return event

    def compute_waits(self, event):
        self.run_copies()
        return super().compute_waits(event)

    def run_copies(self):
        while self.waiting:
            copies, event = self.waiting.pop(0)
            super().h2d(copies, after=None).synchronize()
            event.finish(None)


@pytest.mark.parametrize("waits", [True, False], ids=("whole", "without free_after_h2d"))
def test_a_buffer_is_not_given_up_under_a_copy_that_nobody_waited_for(monkeypatch, waits):
    """The fifth wait of the protocol: without it, memory that compute got next is overwritten."""
    if not waits:
        monkeypatch.setattr(SwapEngine, "free_after_h2d", lambda self, event: None)
    engine = SwapEngine(SlowH2D())
    context, _unread = there_and_back(engine, torch.full((1000,), 7, dtype=torch.uint8))
    context.release()
    computed = engine.backend.memory[:1000].fill_(1)  # compute's next tensor, same memory
    engine.backend.run_copies()
    assert bool((computed == 1).all()) is waits


def test_host_blocks_have_the_size_asked_for():
    block = HostBlock(5000)
    assert block.tensor.numel() == block.array.size == block.nbytes == 5000


def test_layers_in_flight_are_retired_one_by_one_when_another_micro_batch_goes_backward(engine):
    def forward():
        passes = []
        for first in (True, False, False):
            one = engine.begin_layer(first=first, swaps=True, device=torch.device("cpu"))
            one.own.put(torch.randn(50))
            one.own.flush()
            passes.append(one)
        return passes

    older, newer = forward(), forward()
    places = lambda passes: [place(one.own) for one in passes]  # noqa: E731
    assert places(older) == [Place.HOST] * 3
    assert places(newer) == [Place.HOST, Place.SOURCE, Place.SOURCE]
    older[2].begin_backward()
    assert places(older) == [Place.HOST, Place.BUFFER, Place.BUFFER]
    assert places(newer) == [Place.HOST, Place.HOST, Place.SOURCE]
    older[2].end_backward()
    older[1].begin_backward()
    assert places(newer) == [Place.HOST] * 3


def test_the_first_layer_of_a_pass_brings_back_nothing_of_another_pass(engine):
    first = [
        engine.begin_layer(first=first, swaps=True, device=torch.device("cpu"))
        for first in (True, False)
    ]
    second = engine.begin_layer(first=True, swaps=True, device=torch.device("cpu"))
    for one in (*first, second):
        one.own.put(torch.randn(50))
        one.own.flush()
        one.own.retire()
    second.begin_backward()
    assert [place(one.own) for one in first] == [Place.HOST] * 2
