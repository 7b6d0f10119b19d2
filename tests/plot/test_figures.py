"""What the figures show is what plan, simulation and estimate say."""

import itertools
from dataclasses import replace

import pytest

from megatron_memo.estimate.answer import DEFAULT_RESERVE
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import faster_link
from megatron_memo.estimate.strategies import Memo
from megatron_memo.estimate.timeline import simulate
from megatron_memo.phases import START
from megatron_memo.plan.plan_file import PlanError
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.requests import requests_of
from megatron_memo.plan.savings import savings_of
from megatron_memo.plan.verify_plan import verify_plan
from megatron_memo.plot import ticks
from megatron_memo.plot.figure import Axis, Unit
from megatron_memo.plot.layout import layout
from megatron_memo.plot.memory import memory
from megatron_memo.plot.palette import GROUNDS, THEMES, family, ramp
from megatron_memo.plot.streams import streams
from megatron_memo.plot.tradeoff import curve, pareto
from megatron_memo.profile.trace import Free, Header, Malloc, Trace, rounded


def facts(boxes):
    return {fact.label: fact for fact in boxes.facts}


def test_a_layout_has_each_planned_block_where_and_when_it_is(planned):
    (panel,) = layout(planned.plan, planned.trace).panels
    boxes, told = panel.boxes, facts(panel.boxes)
    (window,) = planned.plan.windows
    placed = [(k, e) for k, e in enumerate(window.entries) if e.offset is not None]
    assert len(boxes.x0) == len(placed) < len(window.entries)
    asked = [event for event in planned.trace.events if isinstance(event, Malloc)]
    for at, (k, entry) in enumerate(placed):
        end = entry.offset + rounded(entry.size, planned.plan.rounding)
        sides = boxes.x0[at], boxes.x1[at], boxes.y0[at], boxes.y1[at]
        assert sides == (entry.lower, entry.upper, entry.offset, end)
        assert told["size"].values[at] == entry.size
        assert told[""].names[told[""].values[at]] == str(window.phases[entry.phase])
        assert told["by"].names[told["by"].values[at]] == asked[k].what
    assert max(boxes.y1) == planned.plan.arena == panel.limits[0].y


def test_a_layer_has_one_colour_and_no_other_layer_has_it(planned):
    (panel,) = layout(planned.plan).panels
    told = facts(panel.boxes)[""]
    of_layer = {}
    for place, colour in zip(told.values, panel.boxes.colour, strict=True):
        words = told.names[place].split()
        name = " ".join(words[:2]) if words[0] == "layer" else words[0]
        of_layer.setdefault(name, set()).add(panel.boxes.colours[colour])
    assert {f"layer {k}" for k in range(1, 6)} <= of_layer.keys()
    for name, colours in of_layer.items():
        (colour,) = colours
        assert colour.label == name
    assert len({c.light for c in panel.boxes.colours}) == len(panel.boxes.colours)


def test_bands_tile_the_iteration_in_the_order_of_its_phases(planned):
    (panel,) = layout(planned.plan).panels
    for bands in (panel.bands, panel.fine):
        for one, following in itertools.pairwise(bands):
            assert one.x1 == following.x0 and one.label != following.label
    names = [band.label for band in panel.bands]
    assert names.index("layer forward") < names.index("layer backward")


def test_a_trace_without_names_of_operators_adds_nothing(planned):
    events = tuple(
        event._replace(what="") if isinstance(event, Malloc) else event
        for event in planned.trace.events
    )
    nameless = replace(planned.trace, events=events)
    assert layout(planned.plan, nameless) == layout(planned.plan)


def test_a_window_that_is_not_there_is_refused(planned):
    with pytest.raises(PlanError, match=r"--window 1: the plan has 1 windows, counted from 0"):
        layout(planned.plan, window=1)


def test_memory_agrees_with_the_plan_and_with_what_the_planner_tells(planned):
    (panel,) = memory(planned.plan).panels
    alive, plan, native, expandable = panel.lines
    assert max(alive.y) == verify_plan(planned.plan).most_alive
    assert set(plan.y) == {planned.plan.arena}
    saved = savings_of([requests_of(planned.trace, planned.plan.smallest)])
    for line, reserved in ((native, saved.native), (expandable, saved.expandable)):
        assert f"{reserved / planned.plan.arena:.2f} times the plan" in line.label
        assert list(line.y) == sorted(line.y) and line.y[-1] <= reserved


def test_memory_grows_over_one_iteration_and_the_legend_knows_of_the_second():
    eight, twelve = 8 << 20, 11 << 20
    events = (
        *(Malloc(0, eight, 0, ""), Malloc(1, twelve, 0, ""), Malloc(2, twelve, 0, "")),
        *(Free(0), Free(2), Free(1)),
    )
    trace = Trace(Header("profile"), (START,), events)
    search = Search(time_limit=5, workers=1, use_cp_sat=False)
    plan = make_plan([Source("it", "", trace)], search).plan
    (panel,) = memory(plan).panels
    native = panel.lines[2]
    # 20 MiB hold the first two; of 11 + 11 that are left in a second iteration none holds 8.
    assert native.label.endswith(", after 2 iterations")
    assert list(native.x) == sorted(native.x) and native.x[-1] <= len(events)
    assert native.y[-1] < savings_of([requests_of(trace)]).native
    assert f"{savings_of([requests_of(trace)]).native / (1 << 20):.4g} MiB" in native.label


def test_streams_have_every_event_in_a_lane_of_its_own(costs):
    result = simulate(costs, Memo(0.5, chunks=4, resident=0))
    (panel,) = streams(result, "a job").panels
    boxes = panel.boxes
    events = [event for stage in result.stages for event in stage.events]
    assert len(boxes.x0) == len(events)
    rows = {}
    for k, event in enumerate(events):
        rows.setdefault(int(boxes.y0[k]), []).append((boxes.x0[k], boxes.x1[k], event.stream))
    assert len(rows) == len(panel.y.lanes)
    for row in rows.values():
        assert len({stream for _, _, stream in row}) == 1
        for one, following in itertools.pairwise(sorted(row)):
            assert one[1] <= following[0] * (1 + 1e-9)
    again = next(k for k, c in enumerate(boxes.colours) if c.label == "computed again")
    shown = [e.name for k, e in enumerate(events) if boxes.colour[k] == again]
    assert shown and all(name.endswith("again") for name in shown)
    assert [zoom.label.split(", ")[1] for zoom in panel.zooms] == ["forward", "backward"]


def test_stages_of_a_pipeline_are_named_in_their_lanes(costs):
    two = Costs(replace(costs.job, pp=2, micro_batches=2), costs.machine)
    (panel,) = streams(simulate(two, Memo(0.5)), "a job").panels
    assert {"stage 0: compute", "stage 1: compute"} <= set(panel.y.lanes)


def test_none_on_the_line_of_the_best_is_beaten_by_one_that_fits(costs):
    # Over a fast link, what has no room on the host would be the fastest.
    fast_gpu = faster_link(costs.machine.gpu, 20)
    fast = Costs(costs.job, replace(costs.machine, gpu=fast_gpu, host_memory=4 << 30))
    ways, device, host = pareto(fast, DEFAULT_RESERVE, ratios=4).panels
    assert {"keep all", "full recompute"} <= {line.label for line in ways.lines}
    for panel in (device, host):
        lines = {line.label: line for line in panel.lines}
        best = lines.pop("best that fit")
        fitting = [
            (x, y)
            for line in lines.values()
            for x, y, hollow in zip(line.x, line.y, line.hollow, strict=True)
            if not hollow
        ]
        most = max(x for x, _ in fitting)
        for x, y in zip(best.x, best.y, strict=True):
            assert x <= most
            assert not any(a <= x and b < y for a, b in fitting)
        assert best.y[-1] == min(y for _, y in fitting)
        # A host this small does not hold everything.
        assert any(any(line.hollow) for line in lines.values())
    (limit,) = host.limits
    for line in host.lines:
        for x, hollow in zip(line.x, line.hollow, strict=False):
            assert hollow or x <= limit.x


def test_the_curve_is_relative_to_keeping_everything_and_marks_what_does_not_fit(costs):
    time, device = curve(costs, [1 << 14, 1 << 18], DEFAULT_RESERVE).panels
    lines = {line.label: line for line in time.lines}
    assert lines["keep all"].y == [1.0, 1.0]
    assert lines["keep all"].hollow == [False, True]
    assert all(y > 1.15 for y in lines["full recompute"].y)
    best, fixed = lines["memo, best ratio"], lines["memo, ratio 0"]
    assert all(one <= other * 1.001 for one, other in zip(best.y, fixed.y, strict=True))
    kept = next(line for line in device.lines if line.label == "keep all")
    assert kept.y[0] < device.limits[0].y < kept.y[1]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.3, 0.52, [0.3, 0.35, 0.4, 0.45, 0.5]),
        (19, 21, [19, 19.5, 20, 20.5, 21]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round_and_inside(low, high, found):
    assert ticks.round_ticks(low, high) == pytest.approx(found)


def test_ticks_take_the_unit_of_what_is_seen():
    memory_axis = Axis("memory", Unit.BYTES)
    assert ticks.scale(memory_axis, 0, 3 << 30) == ("GiB", 1 << 30)
    assert ticks.scale(replace(memory_axis, log=True), 5 << 20, 3 << 40) == ("MiB", 1 << 20)
    assert ticks.written(memory_axis, 3 << 29, 1 << 30) == "1.5"
    assert ticks.written(Axis("length", Unit.TOKENS), 1 << 20, 1) == "1M"
    assert ticks.doublings(5, 40) == [8, 16, 32]


def light(colour):
    """Relative luminance, as WCAG 2 has it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("theme", THEMES)
def test_the_ramp_rises_in_lightness_and_stays_off_its_ground(theme):
    steps = [light(ramp(k / 20).on(theme)) for k in range(21)]
    assert steps == sorted(steps)
    ground = light(GROUNDS[theme].plot)
    for step in steps:
        high, low = max(step, ground), min(step, ground)
        assert (high + 0.05) / (low + 0.05) > 1.5


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable_on_its_ground(theme):
    ground = GROUNDS[theme]
    for text in (ground.ink, ground.faint):
        high, low = sorted((light(text), light(ground.paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


def test_neighbours_of_a_family_differ():
    colours = family([f"layer {k}" for k in range(1, 81)])
    for one, other in itertools.pairwise(colours):
        assert one.light != other.light and one.dark != other.dark
