"""Real training on the CPU's wrapped allocator: autograd, Adam, a plan by the portfolio.

What counts is that numbers are bit-identical to those without it, and that all planned is hit.
"""

import gc
import hashlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron_memo.allocator.face import PlanEntry
from megatron_memo.allocator.record import to_trace
from megatron_memo.phases import BACKWARD, FORWARD, HEAD, LAYER, OPTIMIZER, START, Phase
from megatron_memo.plan import portfolio
from megatron_memo.plan.problem import Buffer, Problem
from megatron_memo.profile.trace import Header, rounded

LAYERS, WIDTH, BATCH = 3, 64, 48
RECORDED, LAST = 2, 7  # steps, from 0

PHASES = {
    0: START,
    1: Phase(HEAD, FORWARD, 0),
    2: Phase(HEAD, BACKWARD, 0),
    3: Phase(OPTIMIZER),
    **{10 + k: Phase(LAYER, FORWARD, 0, k + 1) for k in range(LAYERS)},
    **{20 + k: Phase(LAYER, BACKWARD, 0, k + 1) for k in range(LAYERS)},
}
NUMBERS = {phase: number for number, phase in PHASES.items()}


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, enter, forward, backward):
        ctx.enter, ctx.backward_phase = enter, backward
        enter(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.enter(ctx.backward_phase)
        return gradient, None, None, None


class Net(nn.Module):
    def __init__(self, enter):
        super().__init__()
        self.enter = enter
        self.between = None  # called with (layer, its output)
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()),
                *(nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)),
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            # What follows layer k's gradient is layer k-1's backward.
            x = Mark.apply(x, self.enter, 10 + k, 20 + k - 1 if k else 0)
            x = x + layer(x)
            if self.between is not None:
                self.between(k, x)
        return self.head(Mark.apply(x, self.enter, 1, 20 + LAYERS - 1))


class Training:
    """The same training each time; `allocator` None is the reference.

    Attributes:
        digests: of loss and gradients of every step.
        stats: of every step after the plan was made.
    """

    def __init__(self, allocator):
        torch.manual_seed(0)
        self.allocator = allocator
        self.net = Net(allocator.enter if allocator else lambda phase: None)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(1)
        self.digests, self.stats = [], {}
        self.entries = []
        self.peak = 0

    def batch(self, rows=BATCH):
        # Made outside the iteration, as by a data loader.
        x = torch.randn(rows, WIDTH, generator=self.data)
        return x, torch.randint(0, 10, (rows,), generator=self.data)

    def step(self, number, x, y):
        allocator = self.allocator
        if allocator is not None:
            if number == RECORDED:
                allocator.start_recording()
            allocator.reset_stats()
            allocator.begin_iteration()
            allocator.enter(0)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.net.enter(2)
        loss.backward()
        self.net.enter(3)
        self.optimizer.step()
        digest = hashlib.sha256(loss.detach().numpy().tobytes())
        for parameter in self.net.parameters():
            digest.update(parameter.grad.numpy().tobytes())
        self.optimizer.zero_grad(set_to_none=True)
        self.digests.append(digest.hexdigest())
        del loss
        if allocator is not None:
            allocator.end_iteration()
            if number == RECORDED:
                self.plan(allocator.stop_recording())
            self.stats[number] = allocator.stats()

    def plan(self, raw):
        header = Header("allocator", device="cpu", rounding=self.allocator.alignment)
        trace = to_trace(raw, PHASES, header)
        offsets, self.peak = layout(trace)
        assert self.peak == peak_of_placed(trace)
        self.entries = [
            PlanEntry(NUMBERS[trace.phases[b.phase]], b.size, b.stream, offsets.get(b.id))
            for b in trace.blocks()
        ]
        self.allocator.load_plan(self.entries, self.peak)
        self.allocator.replay()

    def run(self, at_step=lambda training, number: None):
        for number in range(LAST + 1):
            at_step(self, number)
            self.step(number, *self.batch())
        return self

    @property
    def placed(self):
        return sum(entry.offset is not None for entry in self.entries)

    def hits_all(self, number):
        stats = self.stats[number]
        return (stats.hits, stats.miss_unknown, stats.miss_occupied) == (self.placed, 0, 0)


def layout(trace):
    """Offsets by block id, and the peak."""
    placed = [b for b in trace.blocks() if b.upper is not None]
    buffers = tuple(
        Buffer(str(b.id), b.lower, b.upper, rounded(b.size, trace.header.rounding)) for b in placed
    )
    best = portfolio.solve(
        Problem(buffers), time_limit=20, workers=1, deterministic=True, use_cp_sat=False
    ).best
    return dict(zip((b.id for b in placed), best.offsets, strict=True)), best.peak


def peak_of_placed(trace):
    """Most rounded bytes alive at once of blocks that end within the window."""
    placed = [b for b in trace.blocks() if b.upper is not None]
    times = {b.lower for b in placed}
    return max(
        sum(rounded(b.size, trace.header.rounding) for b in placed if b.lower <= t < b.upper)
        for t in times
    )


def nothing(training, number):
    pass


@pytest.fixture(scope="module")
def reference():
    """Digests without the allocator, by what happens in between."""
    known = {}

    def of(at_step=nothing):
        if at_step not in known:
            known[at_step] = Training(None).run(at_step).digests
        return known[at_step]

    return of


@pytest.mark.parametrize("smallest", [1, 4096])
def test_everything_planned_is_hit_and_the_numbers_are_bit_identical(
    allocator, reference, smallest
):
    allocator.set_filter(smallest)
    training = Training(allocator).run()
    assert training.digests == reference()
    assert training.placed > 30
    for number in range(RECORDED + 1, LAST + 1):
        assert training.hits_all(number), (number, training.stats[number])
        stats = training.stats[number]
        assert stats.hit_rate == 1.0
        assert stats.arena_peak == stats.arena_size == training.peak
        assert stats.native_mallocs == stats.native_entries
        assert stats.arena_blocks == 0 and stats.unknown_frees == 0


def extra_in_step_4(training, number):
    kept = []

    def between(layer, x):
        if layer == 1:
            kept.append(torch.ones_like(x))
            torch.zeros(5000).sum()

    training.net.between = between if number == 4 else None


def missing_in_step_4(training, number):
    training.net.layers[1][3].p = 0.0 if number == 4 else 0.1


def changed_batch_after_step_4(training, number):
    """One more iteration, of fewer rows."""
    if number == 5:
        training.step(100, *training.batch(BATCH // 3))


def larger_batch_after_step_4(training, number):
    if number == 5:
        training.step(100, *training.batch(BATCH * 2))


def evaluation_after_step_4(training, number):
    if number == 5:
        x, y = training.batch(BATCH * 2)
        training.net.eval()
        with torch.no_grad():
            training.digests.append(str(nn.functional.cross_entropy(training.net(x), y).item()))
        training.net.train()


class StopHereError(Exception):
    pass


def exception_and_retry(training, number):
    """Step 4 breaks off after its second layer and is tried again with the same state."""
    if number != 4:
        return
    state, data = torch.get_rng_state(), training.data.get_state()

    def between(layer, x):
        if layer == 1:
            raise StopHereError

    training.net.between = between
    with pytest.raises(StopHereError):
        training.step(4, *training.batch())
    training.net.between = None
    gc.collect()
    torch.set_rng_state(state)
    training.data.set_state(data)


@pytest.mark.parametrize(
    "deviation",
    [
        *(extra_in_step_4, missing_in_step_4, changed_batch_after_step_4),
        *(larger_batch_after_step_4, evaluation_after_step_4, exception_and_retry),
    ],
)
def test_a_deviation_changes_no_number_and_the_next_iteration_hits_all(
    allocator, reference, deviation
):
    training = Training(allocator).run(deviation)
    assert training.digests == reference(deviation)
    assert training.hits_all(3)
    for number in (5, 6, 7):
        assert training.hits_all(number), (number, training.stats[number])


def test_a_deviating_iteration_misses_and_still_hits_most(allocator):
    training = Training(allocator).run(extra_in_step_4)
    stats = training.stats[4]
    assert not training.hits_all(4)
    assert stats.hit_rate > 0.9
    assert stats.native_mallocs == (stats.native_entries + stats.miss_unknown + stats.miss_occupied)


def test_evaluation_is_not_planned(allocator):
    def evaluate(training, number):
        if number != 5:
            return
        allocator.reset_stats()
        evaluation_after_step_4(training, number)
        training.evaluation = allocator.stats()

    evaluated = Training(allocator).run(evaluate).evaluation
    assert evaluated.outside > 0
    assert evaluated.requests == evaluated.hits == 0


def test_a_tensor_held_beyond_its_iteration_stays_whole_and_keeps_its_bytes(allocator, reference):
    held = []

    def hold(training, number):
        if number == 4:
            training.net.between = lambda layer, x: held.append(x.detach())
        if number == 5:
            training.net.between = None
            training.copies = [x.clone() for x in held]
        if number == 7:
            assert all(map(torch.equal, held, training.copies))
            held.clear()

    training = Training(allocator).run(hold)
    assert training.digests == reference()
    for number in (5, 6):
        stats = training.stats[number]
        assert stats.miss_occupied >= LAYERS
        assert stats.hits > training.placed / 2
    assert training.hits_all(7)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_data_loader_workers_neither_plan_nor_disturb(allocator, reference):
    training = Training(allocator)
    batches = [training.batch() for _ in range(LAST + 1)]
    own = torch.Generator()  # the loader draws a seed; dropout must not see that
    loader = DataLoader(
        batches, batch_size=None, num_workers=2, multiprocessing_context="fork", generator=own
    )
    for number in range(RECORDED + 1):
        training.step(number, *batches[number])
    # The workers are forked while the parent replays and holds planned memory.
    allocator.begin_iteration()
    allocator.enter(10)
    x = torch.zeros(BATCH, WIDTH)
    allocator.end_iteration()
    for number, (x, y) in enumerate(loader):
        if number > RECORDED:
            training.step(number, x, y)
            assert training.hits_all(number), (number, training.stats[number])
    del x, y
    assert training.digests == reference()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_no_plan_and_no_budget(allocator):
    training = Training(allocator).run()
    allocator.set_budget(allocator.stats().device_used + (1 << 20))
    seen = list(DataLoader([training.peak], batch_size=None, num_workers=1, collate_fn=in_child))
    assert seen == [(0, True, True)]


def in_child(_):
    """In a forked worker: requests matched, whether replay is refused, whether 8 MiB may be had."""
    from megatron_memo.allocator.errors import AllocatorError
    from megatron_memo.allocator.face import get_allocator

    allocator = get_allocator("cpu")
    allocator.reset_stats()
    allocator.begin_iteration()
    allocator.enter(10)
    torch.zeros(BATCH, WIDTH)
    try:
        allocator.replay()
        refused = False
    except AllocatorError as error:
        refused = "forked" in str(error)
    large = torch.zeros(2 << 20)
    return allocator.stats().requests, refused, large.numel() == 2 << 20


def test_another_threads_requests_are_left_alone(allocator, reference):
    stop, made = threading.Event(), []

    def work():
        while not stop.is_set():
            made.append(torch.zeros(BATCH, WIDTH).sum().item())

    def disturb(training, number):
        if number == RECORDED + 1:
            thread.start()

    thread = threading.Thread(target=work)
    try:
        training = Training(allocator).run(disturb)
    finally:
        stop.set()
        thread.join()
    assert training.digests == reference()
    assert all(training.hits_all(number) for number in range(RECORDED + 1, LAST + 1))
    assert made


def test_a_new_plan_needs_the_old_plans_blocks_to_be_gone(allocator):
    training = Training(allocator).run()
    allocator.begin_iteration()
    allocator.enter(10)
    kept = [torch.zeros(BATCH, WIDTH) for _ in range(3)]
    allocator.end_iteration()
    assert allocator.stats().arena_blocks
    with pytest.raises(ValueError, match=r"planned blocks .* are still in use"):
        allocator.load_plan(training.entries, training.peak + 4096)
    assert all(bool((x == 0).all()) for x in kept)
    kept.clear()
    allocator.load_plan(training.entries, training.peak + 4096)
    assert allocator.stats().arena_size == training.peak + 4096
