"""The CUDA front-end over torch's own caching allocator: on a GPU, or on the stubbed driver, where
test_cuda_stubbed.py runs this file. Copies are real on the stub, kernels do nothing."""

import ctypes
import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from megatron_memo import native_build
from megatron_memo.allocator import build
from megatron_memo.allocator import library as abi
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import PlanEntry, get_allocator
from megatron_memo.allocator.record import to_trace
from megatron_memo.profile.trace import Header
from tests.allocator.conftest import set_back
from tests.allocator.test_training import BATCH, LAYERS, NUMBERS, PHASES, WIDTH, Net
from tests.stub_cuda.stubbed import lateness, stub_counts, stub_here

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ELEMENTS = MIB // 4  # of a float32 tensor of 1 MiB


@pytest.fixture
def allocator():
    installed = get_allocator("cuda")
    for name in ("last_type", "last_value", "last_exc", "last_traceback"):
        vars(sys).pop(name, None)  # they keep alive what a failed test made
    set_back(installed)
    yield installed
    torch.cuda.synchronize()
    set_back(installed)


@pytest.fixture
def driver():
    stub = stub_here()
    if stub is None:
        pytest.skip("needs the stubbed driver, which can be asked what it was told")
    return stub


@pytest.fixture(scope="module")
def questions():
    """cuda_questions.cpp, compiled as the front-end is."""
    source = Path(__file__).with_name("cuda_questions.cpp")
    recipe = dataclasses.replace(build.recipe("cuda"), name="test-questions", sources=(source,))
    library = ctypes.CDLL(str(native_build.build(recipe)))
    library.question_base.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    library.question_base.restype = ctypes.c_void_p
    library.question_allocate.argtypes = [ctypes.c_size_t]
    library.question_allocate.restype = ctypes.c_void_p
    library.question_delete.argtypes = [ctypes.c_void_p]
    library.question_delete.restype = None
    library.question_deleter_is_torchs.argtypes = [ctypes.c_size_t]
    library.question_deleter_is_torchs.restype = ctypes.c_bool
    return library


@pytest.fixture
def late():
    with lateness() as late:
        yield late


def expandable():
    return "expandable_segments" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def planned(allocator, *offsets, size=MIB, phase=0):
    """Loads a plan of requests of one size; an iteration is under way in its phase."""
    entries = [PlanEntry(phase, size, 0, offset) for offset in offsets]
    allocator.load_plan(entries, max(offset for offset in offsets if offset is not None) + size)
    allocator.replay()
    again(allocator, phase)


def again(allocator, phase=0):
    allocator.begin_iteration()
    allocator.enter(phase)


def tensor(elements=ELEMENTS):
    return torch.empty(elements, device="cuda")


# ---- record, plan, replay


class Placed(NamedTuple):
    offset: int
    length: int
    upper: int


class Training:
    """As in test_training.py, on the device."""

    def __init__(self, allocator):
        torch.manual_seed(0)
        self.allocator = allocator
        self.net = Net(allocator.enter if allocator else lambda phase: None).cuda()
        self.parameters = list(self.net.parameters())
        self.squares = torch._foreach_mul(self.parameters, 0.0)
        self.x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
        self.y = torch.arange(BATCH).remainder(10).cuda()
        self.addresses = []

    def step(self):
        """Loss and gradients, on the host."""
        if self.allocator is not None:
            self.allocator.reset_stats()
            again(self.allocator)
        logits = self.net(self.x)
        self.addresses.append(logits.data_ptr())
        loss = nn.functional.cross_entropy(logits, self.y)
        self.net.enter(2)
        loss.backward()
        self.net.enter(3)
        self.update()
        if self.allocator is not None:
            self.allocator.end_iteration()
        numbers = [loss.detach().cpu(), *(p.grad.cpu() for p in self.parameters)]
        for parameter in self.parameters:
            parameter.grad = None
        return numbers

    @torch.no_grad()
    def update(self):
        """An optimizer without torch.optim, whose first step imports a compiler for seconds."""
        gradients = [p.grad for p in self.parameters]
        torch._foreach_addcmul_(self.squares, gradients, gradients)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_add_(roots, 1e-6)
        torch._foreach_addcdiv_(self.parameters, gradients, roots, value=-1e-3)

    def record_and_plan(self):
        """The recorded events, the entries and the arena's bytes."""
        self.step()
        self.step()
        self.allocator.start_recording()
        self.step()
        raw = self.allocator.stop_recording()
        header = Header("allocator", device="cuda", rounding=self.allocator.alignment)
        trace = to_trace(raw, PHASES, header)
        offsets, peak = first_fit(trace.blocks(), self.allocator.alignment)
        entries = [
            PlanEntry(NUMBERS[trace.phases[b.phase]], b.size, b.stream, offsets.get(b.id))
            for b in trace.blocks()
        ]
        self.allocator.load_plan(entries, peak)
        self.allocator.replay()
        return raw, entries, peak


def first_fit(blocks, alignment):
    """Offsets of the blocks that end within the window, by id; and the end of the highest."""
    placed, peak = {}, 0
    for block in blocks:
        if block.upper is None or block.stream != 0:
            continue
        length = -(-block.size // alignment) * alignment
        offset = 0
        for other in sorted(placed.values()):
            if other.upper > block.lower:  # they come in order: it began earlier
                if offset + length <= other.offset:
                    break
                offset = max(offset, other.offset + other.length)
        placed[block.id] = Placed(offset, length, block.upper)
        peak = max(peak, offset + length)
    return {number: place.offset for number, place in placed.items()}, peak


def test_every_planned_request_of_a_training_step_is_served_at_its_address(allocator):
    training = Training(allocator)
    raw, entries, peak = training.record_and_plan()
    placed = sum(entry.offset is not None for entry in entries)
    assert placed > 10 * LAYERS
    assert len({*raw["thread"].tolist()}) == 2  # autograd runs the backward on its own thread
    for _ in range(3):
        training.step()
        stats = allocator.stats()
        assert (stats.hits, stats.miss_unknown, stats.miss_occupied) == (placed, 0, 0)
        assert stats.native_mallocs == stats.native_entries
        assert 0 < stats.arena_peak <= stats.arena_size == peak
        assert stats.unknown_frees == 0
    assert len(set(training.addresses[-3:])) == 1


def test_a_replayed_step_takes_nothing_from_the_native_allocator_but_small_and_native_entries(
    allocator,
):
    allocator.set_filter(1)
    training = Training(allocator)
    training.record_and_plan()
    training.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    training.step()
    stats = allocator.stats()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert taken == stats.native_entries + stats.outside
    assert stats.hits > 10 * LAYERS


def test_losses_and_gradients_are_bit_identical_to_those_without_it(allocator):
    if stub_here() is not None:
        pytest.skip("kernels do nothing on the stub")
    reference = Training(None)
    expected = [reference.step() for _ in range(6)]
    training = Training(allocator)
    training.record_and_plan()  # takes three steps
    for numbers in expected[3:]:
        assert all(map(torch.equal, training.step(), numbers))


def test_a_request_whose_bytes_are_in_use_goes_native(allocator):
    planned(allocator, 0, 0)
    first, second = tensor(), tensor()
    stats = allocator.stats()
    assert (stats.hits, stats.miss_occupied) == (1, 1)
    assert abs(first.data_ptr() - second.data_ptr()) >= MIB


def test_a_planned_tensor_outlives_its_iteration_and_the_mode(allocator):
    planned(allocator, 0, MIB)
    kept = tensor()
    allocator.end_iteration()
    allocator.off()
    assert allocator.stats().arena_blocks == 1
    again(allocator)
    native = tensor()
    assert allocator.stats().hits == 1
    del native, kept
    assert allocator.stats().arena_blocks == 0


def test_emptying_a_storage_gives_its_planned_bytes_back(allocator):
    planned(allocator, 0)
    t = tensor()
    t.untyped_storage().resize_(0)
    assert allocator.stats().arena_blocks == 0


# ---- streams


def test_bytes_that_a_side_stream_still_reads_are_written_only_after_it(allocator, late):
    planned(allocator, 0, 0)
    side = torch.cuda.Stream()
    result = torch.empty(ELEMENTS, device="cuda")  # the first request, at offset 0
    result, source = tensor_outside(allocator), result
    source.copy_(torch.ones(ELEMENTS))
    side.wait_stream(torch.cuda.current_stream())
    late(side)
    with torch.cuda.stream(side):
        result.copy_(source)
    source.record_stream(side)
    address = source.data_ptr()
    del source
    reused = tensor()
    assert reused.data_ptr() == address
    reused.copy_(torch.zeros(ELEMENTS))
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), torch.ones(ELEMENTS))
    assert allocator.stats().stream_waits == 1


def tensor_outside(allocator):
    """A native one, while a plan is being followed."""
    allocator.off()
    made = tensor()
    allocator.replay()
    return made


def test_the_planned_streams_own_use_needs_no_wait(allocator):
    planned(allocator, 0, 0)
    t = tensor()
    t.record_stream(torch.cuda.current_stream())
    del t
    tensor()
    stats = allocator.stats()
    assert (stats.hits, stats.stream_waits) == (2, 0)


def test_a_side_stream_is_waited_for_once(allocator):
    planned(allocator, 0, 0, 0)
    tensor().record_stream(torch.cuda.Stream())
    for _ in range(2):
        tensor()
    stats = allocator.stats()
    assert (stats.hits, stats.stream_waits) == (3, 1)


def test_native_tensors_keep_the_native_record_stream(allocator, late):
    planned(allocator, 0)
    native = torch.empty(5 * MIB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    late(side)
    with torch.cuda.stream(side):
        native.zero_()
    native.record_stream(side)
    address = native.data_ptr()
    del native
    assert torch.empty(5 * MIB, device="cuda").data_ptr() != address


def test_requests_of_other_streams_are_recorded_under_a_number_and_stay_native(allocator):
    side = torch.cuda.Stream()
    allocator.start_recording()
    again(allocator)
    mine = tensor()
    with torch.cuda.stream(side):
        other = tensor()
    del mine, other
    allocator.end_iteration()
    raw = allocator.stop_recording()
    first, second = raw[raw["kind"] == abi.MALLOC]["stream"].tolist()
    assert first == 0 != second

    allocator.load_plan([PlanEntry(0, MIB, 0, 0), PlanEntry(0, MIB, second, None)], MIB)
    allocator.replay()
    allocator.reset_stats()
    again(allocator)
    mine = tensor()
    with torch.cuda.stream(side):
        other = tensor()
    stats = allocator.stats()
    assert (stats.hits, stats.native_entries, stats.miss_unknown) == (1, 1, 0)
    del mine, other


def test_recording_on_another_stream_drops_the_plan_but_not_under_live_blocks(allocator):
    planned(allocator, 0)
    t = tensor()
    allocator.end_iteration()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with pytest.raises(AllocatorError, match="1 planned blocks of another stream"):
            allocator.start_recording()
        del t
        allocator.start_recording()
        assert allocator.stats().arena_size == 0
        allocator.stop_recording()
        planned(allocator, 0)
        t = tensor()
        assert allocator.stats().arena_blocks == 1
        del t
    allocator.end_iteration()
    allocator.start_recording()
    allocator.stop_recording()


# ---- pools and graphs


def test_a_pools_requests_are_the_pools(allocator):
    planned(allocator, 0)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = tensor()
    assert allocator.stats().requests == 0
    assert len(pool.snapshot()) == 1
    outside = tensor()
    assert allocator.stats().hits == 1
    del inside, outside


def test_a_captured_graphs_requests_are_the_graphs(allocator):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        source = torch.ones(ELEMENTS).cuda()
        allocator.start_recording()  # so that it is the planned one
        allocator.stop_recording()
        planned(allocator, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = source.clone()
        assert allocator.stats().requests == 0
        source.copy_(torch.full((ELEMENTS,), 7.0))
        hit = tensor()
        graph.replay()
        assert torch.equal(result.cpu(), torch.full((ELEMENTS,), 7.0))
        assert allocator.stats().hits == 1
        del hit
    allocator.end_iteration()
    allocator.start_recording()  # the default stream again
    allocator.stop_recording()


def test_a_capture_that_torch_does_not_know_of_gets_no_planned_bytes(allocator, driver):
    stream = torch.cuda.Stream()
    handle = ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream):
        allocator.start_recording()
        allocator.stop_recording()
        planned(allocator, 0)
        assert driver.cudaStreamBeginCapture(handle, 0) == 0
        captured = tensor()
        graph = ctypes.c_void_p()
        assert driver.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert allocator.stats().requests == 0
        del captured
    allocator.end_iteration()
    allocator.start_recording()
    allocator.stop_recording()


def test_bytes_whose_side_stream_is_being_captured_at_their_free_are_left_alone(allocator, driver):
    planned(allocator, 0, 0)
    side = torch.cuda.Stream()
    handle = ctypes.c_void_p(side.cuda_stream)
    t = tensor()
    t.record_stream(side)
    assert driver.cudaStreamBeginCapture(handle, 0) == 0
    del t
    graph = ctypes.c_void_p()
    assert driver.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0  # not broken by us
    tensor()
    stats = allocator.stats()
    assert (stats.hits, stats.miss_occupied) == (1, 1)
    allocator.off()
    allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 2 * MIB)  # another arena starts afresh
    allocator.replay()
    again(allocator)
    tensor()
    assert allocator.stats().hits == 2


# ---- what torch is told


def test_the_arena_is_one_block_of_torchs_statistics(allocator):
    def requested():
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    gc.collect()
    allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 3 * MIB)
    with_it = requested()
    allocator.load_plan([], 0)
    assert with_it - requested() == 3 * MIB
    allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 3 * MIB)
    allocator.replay()
    again(allocator)
    before = requested()
    t = tensor()
    assert allocator.stats().hits == 1
    assert requested() == before
    del t


def test_emptying_the_cache_leaves_the_arena(allocator):
    planned(allocator, 0, 0)
    t = tensor()
    t.copy_(torch.ones(ELEMENTS))
    torch.cuda.empty_cache()
    assert torch.equal(t.cpu(), torch.ones(ELEMENTS))
    del t
    torch.cuda.empty_cache()
    t = tensor()
    assert allocator.stats().hits == 2
    del t


def test_memory_goes_back_to_the_device_when_the_arena_is_given_up(allocator):
    allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 64 * MIB)
    reserved = torch.cuda.memory_reserved()
    allocator.load_plan([], 0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 60 * MIB  # others may share its last pages


def test_no_memory_for_the_arena_is_a_message_and_leaves_no_plan(allocator):
    with pytest.raises(AllocatorError, match=r"no arena of .*: CUDA out of memory") as seen:
        allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 1 << 45)
    assert "\n" not in str(seen.value)
    assert allocator.stats().arena_size == 0


def test_an_arena_above_the_budget_is_refused_and_there_is_no_plan(allocator):
    planned(allocator, 0)
    allocator.set_budget(MIB)
    with pytest.raises(AllocatorError, match=r"arena of 1\.5 MiB, but .* budget is 1 MiB"):
        allocator.load_plan([PlanEntry(0, MIB, 0, 0)], 3 * MIB // 2)
    assert allocator.stats().arena_size == 0
    allocator.load_plan([PlanEntry(0, MIB, 0, 0)], MIB)
    assert allocator.stats().arena_size == MIB


def test_running_out_of_memory_is_torchs_own_error(allocator):
    planned(allocator, 0)
    with pytest.raises(torch.OutOfMemoryError):
        tensor(1 << 45)


def test_memory_history_goes_on(allocator):
    planned(allocator, 0)
    torch.cuda.memory._record_memory_history(context=None)
    try:
        native = tensor(100 * ELEMENTS)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert any(
        entry["action"] == "alloc" and entry["addr"] == native.data_ptr()
        for entry in snapshot["device_traces"][0]
    )


def test_a_shared_planned_tensor_is_told_by_its_place_in_the_arena(allocator):
    if expandable():
        pytest.skip("expandable segments are shared as file descriptors")
    planned(allocator, 0, 2 * MIB)
    tensors = [tensor(), tensor()]
    shared = [t.untyped_storage()._share_cuda_() for t in tensors]
    assert shared[0][1] == shared[1][1]  # the handle
    assert shared[1][3] - shared[0][3] == 2 * MIB  # the place behind it
    del tensors
    assert allocator.stats().arena_blocks == 2  # until the receiver lets go
    for counter in shared:
        torch.UntypedStorage._release_ipc_counter_cuda(*counter[4:6])
    torch.cuda.ipc_collect()
    assert allocator.stats().arena_blocks == 0


def test_the_allocation_around_a_planned_block_is_the_arenas(allocator, questions):
    if expandable():
        pytest.skip("torch tells of no base of expandable segments")
    planned(allocator, 0, 2 * MIB)
    first, second = tensor(), tensor()
    size = ctypes.c_size_t()
    base = questions.question_base(first.data_ptr(), ctypes.byref(size))
    assert questions.question_base(second.data_ptr(), ctypes.byref(size)) == base
    assert base <= first.data_ptr() and second.data_ptr() + MIB <= base + size.value


def test_a_planned_block_may_be_taken_and_given_back_raw(allocator, questions):
    planned(allocator, 0)
    block = questions.question_allocate(MIB)
    assert (allocator.stats().hits, allocator.stats().arena_blocks) == (1, 1)
    questions.question_delete(block)
    assert allocator.stats().arena_blocks == 0
    native = questions.question_allocate(2 * MIB)
    questions.question_delete(native)
    assert allocator.stats().unknown_frees == 0


def test_native_blocks_have_the_deleter_that_torch_takes_for_its_own(allocator, questions):
    planned(allocator, 0)
    assert questions.question_deleter_is_torchs(2 * MIB)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it is the point
def test_a_forked_child_plans_nothing_and_may_free_what_it_inherited(allocator):
    planned(allocator, 0, MIB)
    inherited = tensor()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del inherited
            allocator.replay()
        except AllocatorError as error:
            status = 0 if "forked" in str(error) and not allocator.stats().arena_blocks else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert allocator.stats().arena_blocks == 1


def test_recorded_frees_are_those_of_native_blocks_of_this_recording(allocator):
    before = tensor()
    allocator.start_recording()
    again(allocator)
    during = tensor()
    del before, during
    kept = tensor()
    allocator.end_iteration()
    raw = allocator.stop_recording()
    del kept
    assert raw["kind"].tolist() == [
        *(abi.ITERATION_BEGIN, abi.PHASE),
        *(abi.MALLOC, abi.FREE, abi.MALLOC, abi.ITERATION_END),
    ]


def test_the_device_is_asked_for_nothing_while_a_plan_is_followed(allocator, driver):
    training = Training(allocator)
    training.record_and_plan()
    training.step()
    before = stub_counts(driver)
    training.step()
    after = stub_counts(driver)
    assert after.mallocs == before.mallocs and after.frees == before.frees
    assert after.launches > before.launches
