"""The CUDA backend on a GPU, or on the stubbed driver, where test_cuda_stubbed.py runs this file.
Not yet seen on hardware.

Data is made on the host and compared there: on the stub copies are real and kernels do nothing.
"""

import ctypes
import gc

import pytest
import torch

from megatron_memo.config import HostSettings
from megatron_memo.swap.cuda import MOST_EVENTS_WAITING, CudaStreamBackend, RegisteredBlock
from megatron_memo.swap.engine import SwapEngine, get_engine, set_engine
from tests.stub_cuda.stubbed import lateness, stub_counts, stub_here

pytestmark = pytest.mark.gpu

LAYERS = 6
OTHER = 100  # no layer
ELEMENTS = 1 << 18
NBYTES = 4 * ELEMENTS
WAITS = (
    *("d2h_after_compute", "retire_after_d2h"),
    *("buffer_is_free", "read_after_h2d", "free_after_h2d"),
)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def engine():
    return SwapEngine(CudaStreamBackend(), poison=True)


@pytest.fixture
def driver():
    stub = stub_here()
    if stub is None:
        pytest.skip("needs the stubbed driver, which can be asked what it was told")
    return stub


@pytest.fixture
def late():
    with lateness() as late:
        yield late


def values(layer):
    """What the layer saves; no two layers the same."""
    return torch.arange(ELEMENTS, dtype=torch.float32) + layer


class Pass:
    """A forward and a backward of some layers through the engine, with one late stream.

    Every layer's values are computed, saved and freed in forward, and read in backward except
    those of layer `unread`, whose buffer is given up with nobody having asked for it.
    """

    def __init__(self, engine, device, late=lambda stream: None, which="none", unread=None):
        self.engine, self.device, self.unread = engine, device, unread
        backend = engine.backend
        self.streams = {
            "none": (),
            "compute": (torch.cuda.current_stream(),),
            "D2H": (backend._d2h,),
            "H2D": (backend._h2d,),
        }[which]
        self.late = late
        self.results = {}

    def begin(self):
        for stream in self.streams:
            self.late(stream)

    def run(self):
        """Layers whose values were wrong when read."""
        contexts = []
        for layer in range(LAYERS):
            self.begin()
            source = self.computed(layer)
            context = self.new_context(first=layer == 0)
            contexts.append((context, context.put(source)))
            context.flush()
            del source
        for context, _ in contexts:
            context.retire()
        for layer in reversed(range(LAYERS)):
            self.begin()
            context, handle = contexts[layer]
            context.prefetch()
            if layer != self.unread:
                self.results[layer] = context.get(handle).clone()
            context.release()
            if layer == self.unread:
                # Compute's next tensor, in the memory of the buffer that was given up.
                self.results[OTHER] = self.computed(OTHER)
        torch.cuda.synchronize()
        return [k for k, seen in self.results.items() if not torch.equal(seen.cpu(), values(k))]

    def computed(self, layer):
        """Written by the compute stream, over whatever was in that memory."""
        made = torch.empty(ELEMENTS, device=self.device)
        made.copy_(values(layer).pin_memory(), non_blocking=True)
        return made

    def new_context(self, first):
        return self.engine.begin_layer(first=first, swaps=True, device=self.device).own


@pytest.mark.parametrize("which", ["none", "compute", "D2H", "H2D"])
@pytest.mark.parametrize("unread", [None, 3])
def test_values_come_back_bitwise_whichever_stream_is_late(engine, device, late, which, unread):
    assert Pass(engine, device, late, which, unread).run() == []


@pytest.mark.parametrize(
    ("wait", "which", "unread"),
    [
        ("d2h_after_compute", "compute", None),
        ("retire_after_d2h", "D2H", None),
        ("buffer_is_free", "compute", None),
        ("read_after_h2d", "H2D", None),
        ("free_after_h2d", "H2D", 3),
    ],
)
def test_no_wait_of_the_protocol_can_be_left_out(
    engine, device, driver, late, monkeypatch, wait, which, unread
):
    assert wait in WAITS
    monkeypatch.setattr(SwapEngine, wait, lambda self, *event: None)
    assert Pass(engine, device, late, which, unread).run() != []


def test_a_process_with_a_gpu_swaps_with_it():
    set_engine(None)
    try:
        assert get_engine().backend.name == "cuda"
    finally:
        set_engine(None)


def test_layers_may_run_on_a_stream_of_their_own(engine, device, late):
    with torch.cuda.stream(torch.cuda.Stream()):
        assert Pass(engine, device, late, "compute").run() == []


def test_device_memory_is_given_up_when_a_layer_is_retired(engine, device):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    context.put(values(0).to(device))
    context.flush()
    assert torch.cuda.memory_allocated() >= before + NBYTES
    context.retire()
    assert torch.cuda.memory_allocated() == before


def test_no_memory_is_taken_on_a_side_stream(engine, device):
    """A second pass finds all it needs in what the first one left to the compute stream."""
    Pass(engine, device).run()
    reserved = torch.cuda.memory_reserved()
    Pass(engine, device).run()
    assert torch.cuda.memory_reserved() == reserved


def test_memory_that_is_given_up_is_poisoned(engine, device):
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    elements = 6 << 20  # torch's allocator keeps so large a block apart and gives it out again
    source = torch.zeros(elements).to(device)
    address = source.data_ptr()
    context.put(source)
    context.flush()
    del source
    context.retire()
    again = torch.empty(elements, device=device)
    assert again.data_ptr() == address
    assert again.cpu().isnan().all()


def test_host_blocks_are_page_locked_so_that_no_copy_blocks_the_host(engine, device, driver):
    sources = [values(k).to(device) for k in range(2)]
    before = stub_counts(driver)
    for source in sources:
        context = engine.begin_layer(first=True, swaps=True, device=device).own
        handle = context.put(source)
        context.flush()
        context.retire()
        context.prefetch()
        context.get(handle)
        context.release()
    after = stub_counts(driver)
    assert after.copies - before.copies == 4
    assert after.pageable_copies == before.pageable_copies


def test_a_copy_under_way_does_not_hold_up_the_host(engine, device, driver, late):
    source = values(0).to(device)
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    handle = context.put(source)
    late(engine.backend._d2h)
    context.flush()
    del source
    context.retire()
    context.prefetch()
    got = context.get(handle).clone()
    assert not engine.backend._d2h.query()  # nothing of this has been done yet
    assert torch.equal(got.cpu(), values(0))


def test_time_that_copies_take_is_read_without_waiting_for_any(engine, device, late):
    source = values(0).to(device)
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    context.put(source)
    late(engine.backend._d2h)
    context.flush()
    assert engine.stats()["d2h_busy_s"] == 0  # under way
    assert not engine.backend._d2h.query()
    torch.cuda.synchronize()
    clock = engine.backend._d2h_clock
    assert len(clock._waiting) == 1
    assert engine.stats()["d2h_busy_s"] > 0
    assert not clock._waiting


def test_a_stream_that_stands_still_for_a_copy_tells_how_long(engine, device, late):
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    source = values(0).to(device)
    context.put(source)
    late(engine.backend._d2h)
    context.flush()
    context.retire()
    torch.cuda.synchronize()
    stats = engine.stats()
    assert stats["exposed_d2h_s"] > 0.5 * stats["d2h_busy_s"] > 0
    assert stats["exposed_h2d_s"] == 0


def test_nobody_need_ask_for_the_time_that_copies_take(engine, device):
    for _ in range(2 * MOST_EVENTS_WAITING):
        engine.backend.h2d([], None)
        torch.cuda.synchronize()
    assert len(engine.backend._h2d_clock._waiting) <= MOST_EVENTS_WAITING


def test_a_host_block_is_unlocked_when_it_is_closed(driver):
    block = RegisteredBlock(1 << 20)
    address = ctypes.c_void_p(block.tensor.data_ptr())
    assert driver.cudaHostRegister(address, ctypes.c_size_t(1 << 20), 0) != 0
    block.close()
    assert driver.cudaHostUnregister(address) != 0
    driver.cudaGetLastError()


def test_a_host_block_is_unlocked_when_nobody_has_it_any_more(driver):
    block = RegisteredBlock(1 << 20)
    address = ctypes.c_void_p(block.tensor.data_ptr())
    del block
    gc.collect()
    assert driver.cudaHostUnregister(address) != 0
    driver.cudaGetLastError()


def test_host_memory_that_cannot_be_locked_is_an_error_that_says_what_to_do(engine, driver):
    with pytest.raises(MemoryError, match="could not page-lock") as seen:
        engine.host.take(2 << 30)
    driver.cudaGetLastError()
    assert "ulimit -l" in str(seen.value) and "--memo-swap-ratio" in str(seen.value)
    assert engine.host.total_bytes == 0


def test_an_idle_host_block_is_closed_only_after_its_copies(engine, device, late):
    """A graph that is dropped while its copies are under way."""
    context = engine.begin_layer(first=True, swaps=True, device=device).own
    context.put(values(0).to(device))
    late(engine.backend._d2h)
    context.flush()
    context.retire()
    context.release()
    engine.host.give_up_idle()
    assert engine.backend._d2h.query()
    assert engine.host.total_bytes == 0


def test_values_come_back_bitwise_through_a_disk(device, late, tmp_path):
    """Threads of the disk tier give copies to the streams; compute waits for them and for these."""
    settings = HostSettings(1 << 20, str(tmp_path), 64 << 20, need=6 * NBYTES, spill=6 * NBYTES)
    engine = SwapEngine(CudaStreamBackend(), poison=True, host=settings)
    assert Pass(engine, device, late).run() == []
    assert engine.stats()["disk_bytes"] >= 6 * NBYTES
