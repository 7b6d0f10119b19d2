"""A simulated iteration obeys what any real one does."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.estimate import flops, schedule
from megatron_memo.estimate.clock import COMPUTE, D2H, DISK_READ, DISK_WRITE, H2D, TP
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import GB, GIB, Machine, faster_link, gpu
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import (
    FineGrainedOffload,
    FullRecompute,
    Memo,
    PaperMemo,
    Stock,
)
from megatron_memo.estimate.timeline import simulate
from megatron_memo.phases import OPTIMIZER

A800 = gpu("a800-80g")
SMALL = Job(
    layers=8,
    hidden=4096,
    ffn=16384,
    heads=32,
    head_dim=128,
    groups=32,
    vocabulary=51200,
    sequence=1 << 17,
    tp=8,
    sequence_parallel=True,
    distributed_optimizer=True,
)
LAYOUTS = {
    "one stage": {},
    "micro-batches": dict(micro_batches=3),
    "pipeline": dict(tp=4, pp=4, micro_batches=6),
    "interleaved": dict(tp=4, pp=2, virtual=2, micro_batches=4, overlap_p2p=True),
    "context": dict(tp=4, cp=2),
    "data": dict(tp=4, dp=2, overlap_grad_reduce=True, overlap_param_gather=True),
    "data, in the open": dict(tp=4, dp=2, micro_batches=2),
}
WAYS = {
    "stock": Stock(),
    "full": FullRecompute(),
    "fine-grained": FineGrainedOffload(),
    "paper": PaperMemo(0.5),
    "memo 1": Memo(1.0, chunks=4),
    "memo 0.5": Memo(0.5, chunks=4, resident=0),
    "memo 0": Memo(0.0, chunks=2),
    "memo by steps": Memo(0.6, chunks=4, depth=3),
}


def simulated(way, job=SMALL, machine=None, **layout):
    return simulate(Costs(replace(job, **layout), machine or Machine(A800)), way)


def slow(factor):
    """A machine whose links to the host have `factor` of their bandwidth."""
    return Machine(faster_link(A800, factor))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_streams_do_one_thing_at_a_time_and_time_adds_up(way, layout):
    result = simulated(way, machine=slow(0.2), **layout)
    for stage in result.stages:
        by_stream = {}
        for event in stage.events:
            by_stream.setdefault(event.stream, []).append(event)
        for stream, events in by_stream.items():
            events.sort(key=lambda e: e.start)
            for one, following in itertools.pairwise(events):
                assert one.start + one.seconds <= following.start + 1e-9
            assert sum(e.seconds for e in events) == pytest.approx(stage.busy[stream])
            assert events[-1].start + events[-1].seconds <= result.seconds + 1e-9
        accounted = stage.busy[COMPUTE] + sum(stage.exposed.values()) + stage.idle
        assert accounted == pytest.approx(result.seconds)
        assert stage.idle >= -1e-9
        assert stage.moved_in <= stage.moved_out


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_same_work_is_done_under_any_schedule(way):
    # Operators depend on tp and on tokens only, so compute of all stages is that of one.
    alone = simulated(way, tp=4, micro_batches=4)
    staged = simulated(way, tp=4, micro_batches=4, pp=4)
    update = sum(Costs(replace(SMALL, tp=4), Machine(A800)).optimizer(0))
    staged_updates = sum(
        sum(Costs(replace(SMALL, tp=4, pp=4), Machine(A800)).optimizer(s)) for s in range(4)
    )
    total = sum(stage.busy[COMPUTE] for stage in staged.stages) - staged_updates
    assert total == pytest.approx(alone.stages[0].busy[COMPUTE] - update)


@pytest.mark.parametrize("nvlink", [1.0, 0.02])
def test_stock_takes_its_steps_one_after_another(nvlink):
    """With a slow link, what runs beside compute is what takes longer."""
    costs = Costs(SMALL, Machine(replace(A800, nvlink=A800.nvlink * nvlink)))
    result = simulate(costs, Stock())
    kinds = ("pre", "attention", "post", "backward pre", "backward attention", "backward post")
    seconds = 8 * sum(costs.step(kind, 1).alone for kind in kinds)
    for backward in (False, True):
        seconds += costs.embedding(backward).alone + costs.head(backward, None).alone
    assert result.seconds == pytest.approx(seconds + sum(costs.optimizer(0)))
    assert result.host_peak == 0


def test_full_recompute_adds_one_forward():
    costs = Costs(SMALL, Machine(A800))
    stock, full = simulate(costs, Stock()), simulate(costs, FullRecompute())
    assert full.seconds - stock.seconds == pytest.approx(8 * costs.layer_forward())


def test_utilization_counts_the_model_s_operations_only():
    costs = Costs(SMALL, Machine(A800))
    stock, full = simulate(costs, Stock()), simulate(costs, FullRecompute())
    assert full.mfu_causal == pytest.approx(stock.mfu_causal * stock.seconds / full.seconds)
    done = flops.of_iteration(SMALL, causal=True) / stock.seconds
    assert stock.mfu_causal == pytest.approx(done / (8 * 312e12))
    assert stock.mfu_full > stock.mfu_causal
    assert stock.tokens_per_second == pytest.approx((1 << 17) / stock.seconds)


@pytest.mark.parametrize("depth", [None, 1, 5])
def test_swapping_everything_over_an_infinite_link_costs_the_chunks_only(depth):
    machine = slow(1e9)
    costs = Costs(SMALL, machine)
    stock = simulate(costs, Stock())
    for chunks in (1, 8):
        memo = simulate(costs, Memo(1.0, chunks=chunks, depth=depth))
        lost = 0.0
        for kind in ("pre", "post", "backward pre", "backward post"):
            lost += chunks * costs.step(kind, 1, 1 / chunks).alone - costs.step(kind, 1).alone
        assert memo.seconds == pytest.approx(stock.seconds + 8 * lost, rel=1e-6)
        assert memo.exposed[D2H] + memo.exposed[H2D] < 1e-6


def test_the_ratio_that_hides_the_copies_is_that_of_the_paper_s_program():
    """The link is such that alpha = 0.4 takes a layer's forward."""
    costs = Costs(SMALL, Machine(A800))
    saved = costs.saved(1)
    needed = (saved.input + saved.attention + 0.4 * saved.others) / costs.layer_forward()
    costs = Costs(SMALL, slow(needed / costs.d2h))
    assert PaperMemo().alpha(costs) == pytest.approx(0.4, abs=1e-3)
    # Backward takes longer than forward, so what hides in forward hides.
    for ratio, hides in ((0.39, True), (0.45, False)):
        exposed = simulate(costs, PaperMemo(ratio)).exposed
        assert (exposed[D2H] < 1e-9) == hides
        assert exposed[H2D] < 1e-9


def test_exposed_time_of_a_slow_link_is_what_it_cannot_hide():
    """Copies far longer than compute: step time is that of the copies alone."""
    costs = Costs(SMALL, slow(1e-4))
    result = simulate(costs, PaperMemo(1.0, resident=2))
    copies = 6 * costs.saved(1).total / costs.d2h
    assert result.stages[0].busy[D2H] == pytest.approx(copies)
    # Forward waits for all that is swapped, backward for all that comes back.
    assert result.exposed[D2H] == pytest.approx(copies, rel=0.01)
    assert result.exposed[H2D] == pytest.approx(copies, rel=0.01)


@given(
    factor=st.floats(0.02, 3),
    more=st.floats(1.0, 4),
    ratio=st.floats(0, 1),
    chunks=st.integers(1, 9),
    depth=st.sampled_from([None, 1, 2, 5, 12]),
    layout=st.sampled_from([LAYOUTS["one stage"], LAYOUTS["pipeline"], LAYOUTS["interleaved"]]),
)
@settings(max_examples=25, deadline=None)
def test_more_bandwidth_is_never_slower(factor, more, ratio, chunks, depth, layout):
    way = Memo(ratio, chunks=chunks, resident=1, depth=depth)
    before = simulated(way, machine=slow(factor), **layout).seconds
    after = simulated(way, machine=slow(factor * more), **layout).seconds
    assert after <= before * (1 + 1e-9)


@given(factor=st.floats(0.02, 3), ratio=st.floats(0, 1), layout=st.sampled_from(sorted(LAYOUTS)))
@settings(max_examples=15, deadline=None)
def test_no_step_is_shorter_than_its_compute_or_its_copies(factor, ratio, layout):
    result = simulated(Memo(ratio, chunks=3), machine=slow(factor), **LAYOUTS[layout])
    for stage in result.stages:
        assert result.seconds >= max(stage.busy.values())
    assert result.seconds >= simulated(Stock(), **LAYOUTS[layout]).seconds * (1 - 1e-9)


def test_host_memory_holds_what_is_swapped_until_its_backward_ends():
    costs = Costs(SMALL, Machine(A800))
    saved = costs.saved(1)
    layer = saved.always + 0.5 * saved.others
    one = simulate(costs, Memo(0.5, chunks=4, resident=2))
    assert one.host_peak == pytest.approx(6 * layer, rel=1e-6)
    # The first of four stages has four micro-batches in flight, the last one.
    staged = simulated(Memo(0.5, chunks=4, resident=0), tp=8, pp=4, micro_batches=8)
    peaks = [stage.host_peak for stage in staged.stages]
    assert peaks == [pytest.approx(2 * n * layer, rel=1e-6) for n in (4, 3, 2, 1)]


def test_what_the_host_cannot_hold_goes_to_disk_and_back():
    saved = Costs(SMALL, Machine(A800)).saved(1)
    room = round(3.5 * saved.total)
    tight = dict(host_memory=8 * room, disk=1 << 44)
    way = Memo(1.0, chunks=2, resident=0)
    slow_disk = simulated(way, machine=Machine(A800, **tight, disk_write=GB, disk_read=GB))
    fast_disk = simulated(way, machine=Machine(A800, **tight, disk_write=1e15, disk_read=1e15))
    without = simulated(way)
    assert slow_disk.host_peak <= room
    assert slow_disk.host_peak + slow_disk.disk_peak == pytest.approx(without.host_peak, rel=1e-6)
    assert slow_disk.exposed[H2D] > without.exposed[H2D]
    assert without.seconds <= fast_disk.seconds <= slow_disk.seconds
    assert fast_disk.seconds == pytest.approx(without.seconds, rel=1e-3)
    # Without a disk the host's bytes are told, and the reader sees that they do not fit.
    assert simulated(way, machine=Machine(A800, host_memory=8 * room)).host_peak > room


def test_the_last_layers_in_flight_never_leave_the_device_for_good():
    costs = Costs(SMALL, Machine(A800))
    result = simulate(costs, Memo(1.0, chunks=1, resident=0))
    layer = costs.saved(1).total
    assert result.stages[0].moved_out == pytest.approx(8 * layer, rel=1e-6)
    assert result.stages[0].moved_in == pytest.approx(6 * layer, rel=1e-6)


def test_a_pipeline_s_bubble_is_the_known_one():
    job = replace(SMALL, vocabulary=64, pp=4, micro_batches=8, overlap_p2p=True)
    fast = Machine(replace(A800, nvlink=1e18), gpus=64)
    result = simulate(Costs(job, fast), Stock())
    alone = simulate(Costs(replace(job, pp=1), fast), Stock())
    # (p - 1)/m of the work of a stage; virtual stages divide it by their number.
    assert result.seconds == pytest.approx(alone.seconds / 4 * (1 + 3 / 8), rel=0.02)
    interleaved = simulate(Costs(replace(job, virtual=2), fast), Stock())
    assert interleaved.seconds == pytest.approx(alone.seconds / 4 * (1 + 3 / 16), rel=0.02)


def test_gradients_summed_beside_backward_cost_less_than_after_it():
    layout = dict(tp=2, dp=32, sequence=1 << 14)
    hidden = simulated(Stock(), **layout, overlap_grad_reduce=True, overlap_param_gather=True)
    shown = simulated(Stock(), **layout)
    assert hidden.seconds < shown.seconds
    assert hidden.stages[0].busy["dp"] == pytest.approx(shown.stages[0].busy["dp"], rel=0.01)


def test_phases_of_a_trace_give_the_timeline_of_the_job():
    costs = Costs(replace(SMALL, tp=4, pp=2, micro_batches=3), Machine(A800))
    way = Memo(0.5, chunks=4)
    told = [schedule.passes(costs.job, stage, 4) for stage in (0, 1)]
    assert simulate(costs, way, told) == simulate(costs, way)
    with pytest.raises(
        ValueError, match="of 4 token chunks a layer, the strategy 'stock' has None"
    ):
        simulate(costs, Stock(), told)
    with pytest.raises(ValueError, match="1 sequences of phases for 2 pipeline stages"):
        simulate(costs, way, told[:1])


def test_offloading_fewer_modules_moves_fewer_bytes():
    unit = SMALL.unit_bytes
    some = simulated(FineGrainedOffload(("attn_norm", "mlp_norm")))
    assert some.stages[0].moved_out == 7 * 2 * unit
    every = simulated(FineGrainedOffload())
    statistics = Costs(SMALL, Machine(A800)).saved(1).statistics
    assert every.stages[0].moved_out == 7 * (7 * unit + statistics)
    with pytest.raises(ValueError, match="--offload-modules moe_act: the estimate knows attn_norm"):
        FineGrainedOffload(("moe_act",))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="--memo-prefetch-depth 0"):
        Memo(1.0, depth=0)
    with pytest.raises(ValueError, match="--memo-swap-ratio 2"):
        Memo(2)
    with pytest.raises(ValueError, match="--memo-chunks 99999999"):
        simulated(Memo(1.0, chunks=99999999))


def test_a_host_that_holds_not_even_the_inputs_is_refused_with_what_is_needed():
    machine = Machine(A800, host_memory=GIB)
    with pytest.raises(ValueError, match=r"need \d+ GiB a node, 1 GiB are there"):
        simulated(PaperMemo(), machine=machine)


def test_a_layer_comes_back_while_the_one_above_it_goes_backward_and_not_before():
    events = simulated(PaperMemo(1.0)).stages[0].events
    backward = {}
    for event in events:
        works = event.stream in (COMPUTE, TP) and event.phase.direction == "backward"
        if works and event.phase.layer:
            backward.setdefault(event.phase.layer, event.start)
    back = {event.name: event.start for event in events if event.stream == H2D}
    assert len(back) == 6
    # The last two are resident; the topmost one that is not comes first of all.
    above = {layer: layer + 1 for layer in range(1, 6)} | {6: 8}
    for layer, other in above.items():
        assert back[f"layer {layer}: layer"] == pytest.approx(backward[other])


@pytest.mark.parametrize("way", [PaperMemo(1.0, resident=0), Memo(1.0, 1, resident=0, depth=1)])
def test_a_slow_disk_holds_copies_to_the_host_back_and_is_read_after_it_was_written(way):
    machine = Machine(A800, host_memory=0, disk=1 << 44, disk_write=8 * GB, disk_read=1e15)
    stage = simulated(way, machine=machine).stages[0]
    assert stage.host_peak == 0 and stage.disk_peak > 0
    by_stream = {
        stream: [e for e in stage.events if e.stream == stream]
        for stream in (D2H, DISK_WRITE, DISK_READ)
    }
    written = {e.name: e.start + e.seconds for e in by_stream[DISK_WRITE]}
    for one, two_later in zip(by_stream[D2H], by_stream[D2H][2:], strict=False):
        assert two_later.start >= written[one.name]  # two staging buffers
    assert all(e.start >= written[e.name] for e in by_stream[DISK_READ])
    assert by_stream[DISK_READ]


def test_groups_come_back_as_many_steps_ahead_as_the_depth_says():
    events = simulated(Memo(1.0, 1, resident=0, depth=2), machine=slow(1e6)).stages[0].events
    back = {event.name: event.start for event in events if event.stream == H2D}
    begins = {}
    for event in events:
        if event.stream in (COMPUTE, TP) and event.phase.direction == "backward":
            begins.setdefault((event.phase.layer, event.name), event.start)
    for layer in range(1, 7):
        # Steps of a layer in backward: post, attention, pre; two steps before each, in the layer
        # above.
        above = layer + 1
        mlp = back[f"layer {layer}: chunk 0, MLP"]
        assert mlp == pytest.approx(begins[above, "attention backward"], abs=1e-6)
        q_k_v = back[f"layer {layer}: chunk 0, q k v"]
        assert q_k_v == pytest.approx(begins[above, "pre backward"], abs=1e-6)
        norm = back[f"layer {layer}: chunk 0, norm"]
        assert norm == pytest.approx(begins[layer, "post backward"], abs=1e-6)


def test_no_stage_updates_weights_before_all_have_their_gradients():
    result = simulated(Stock(), tp=4, pp=4, micro_batches=4)
    backward = [
        event.start + event.seconds
        for stage in result.stages
        for event in stage.events
        if event.phase.direction == "backward" and event.stream == COMPUTE
    ]
    for stage in result.stages:
        updates = [event.start for event in stage.events if event.phase.part == OPTIMIZER]
        assert updates and min(updates) >= max(backward)


def test_a_layer_s_forward_waits_for_its_weights():
    layout = dict(tp=2, dp=32, sequence=1 << 12, overlap_param_gather=True)
    events = simulated(Stock(), **layout).stages[0].events
    gathered = [e.start + e.seconds for e in events if e.name == "weights"][1:]  # after the table
    for layer, ready in enumerate(gathered, start=1):
        own = [e.start for e in events if e.phase.layer == layer and e.stream == COMPUTE]
        assert min(own) >= ready
