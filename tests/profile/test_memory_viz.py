"""Plans in PyTorch's memory viewer: what it would show, replayed here, is what the plan says."""

import dataclasses
import importlib.util
import json
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_memo import cli
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.plan import atomic_file
from megatron_memo.plan.made_up_traces import SIDE_STREAM, Shape, training
from megatron_memo.plan.plan_file import Entry, Plan, PlanError, Window, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.requests import requests_of
from megatron_memo.profile.memory_viz import (
    BASE,
    export_snapshot,
    fullest_window,
    shown,
    snapshot_of,
)
from megatron_memo.profile.snapshot import import_snapshot, read_snapshot
from megatron_memo.profile.trace import Free, Malloc, rounded

NAME = "it.plan.jsonl"
SMALLEST = 1 << 20  # so that the native allocator has something to do
TRACES = [
    training(Shape(3, micro_batches=1, unit=1 << 20)),
    training(Shape(3, chunks=2, micro_batches=2, unit=1 << 22)),
]
# What `unpickle` of pytorch's torch/utils/viz/MemoryViz.js has a case for.
KNOWN_TO_THE_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "DICT", "LIST"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE"),
}


@pytest.fixture(scope="module")
def plan():
    sources = [Source(f"{k}.trace.jsonl", str(k), trace) for k, trace in enumerate(TRACES)]
    search = Search(time_limit=20, workers=1, use_cp_sat=False)
    return make_plan(sources, search, smallest=SMALLEST).plan


@pytest.fixture
def path(plan, tmp_path):
    write_plan(tmp_path / NAME, plan)
    return tmp_path / NAME


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pickle"


def planned(plan, number):
    return [(k, e) for k, e in enumerate(plan.windows[number].entries) if e.offset is not None]


def by_hand(**changes):
    """Two blocks that take turns on the same bytes at one moment, between two native requests."""
    phases = (Phase("other"), Phase(LAYER, FORWARD, 0, 3), Phase(LAYER, BACKWARD, 0, 3, 1))
    entries = (
        Entry(0, 100, 9, None, 0, 2),
        Entry(1, 1000, 7, 0, 1, 4),
        Entry(2, 700, 7, 0, 4, 8),
        Entry(2, 500, 7, 1024, 5, 8),
        Entry(2, 64, 7, None, 6, None),
    )
    window = Window("hand.trace.jsonl", "1", {}, 3, 7, phases, entries)
    plan = Plan("cuda", 1, 4, (1,), 512, 512, 1536, 1536, "load", "hand", "a test", (window,))
    return dataclasses.replace(plan, **changes)


# ---- what the importer finds in it


@pytest.mark.parametrize("number", [0, 1])
def test_what_comes_back_are_the_planned_requests_of_the_trace_and_their_peak(plan, out, number):
    export_snapshot(out, plan, number, NAME)
    found = import_snapshot(out, start=0)

    trace = TRACES[number]
    ids = [event.id for event in trace.events if isinstance(event, Malloc)]
    wanted = {ids[k]: new for new, k in enumerate(requests_of(trace, SMALLEST).planned)}
    assert 0 < len(wanted) < len(ids)
    sizes = {wanted[e.id]: e.size for e in trace.events if isinstance(e, Malloc) and e.id in wanted}
    events = [
        Malloc(wanted[e.id], e.size, e.stream, "") if isinstance(e, Malloc) else Free(wanted[e.id])
        for e in trace.events
        if isinstance(e, Malloc | Free) and e.id in wanted
    ]
    assert [e._replace(what="") if isinstance(e, Malloc) else e for e in found.events] == events
    assert not found.held

    alive = most = 0
    for event in events:
        change = rounded(sizes[event.id], plan.rounding)
        alive += change if isinstance(event, Malloc) else -change
        most = max(most, alive)
    assert found.peak() == most


def test_every_request_says_its_phase_in_words(plan, out):
    export_snapshot(out, plan, 1, NAME)
    window = plan.windows[1]
    whats = [e.what for e in import_snapshot(out, start=0).events if isinstance(e, Malloc)]
    assert whats == [str(window.phases[entry.phase]) for _, entry in planned(plan, 1)]
    assert "layer 3 chunk 1 backward of micro-batch 0" in whats


# ---- what the viewers do with it


@pytest.mark.parametrize("number", [0, 1])
def test_replayed_backwards_as_the_viewer_does_every_moment_is_the_plans(plan, number):
    """The web viewer undoes the history from the state at its end, free by free."""
    snapshot = snapshot_of(plan, number, NAME)
    (segment,) = snapshot["segments"]
    (history,) = snapshot["device_traces"]
    assert all(block["state"] == "inactive" for block in segment["blocks"])
    alive, checked = {}, 0
    for event in reversed(history[1:]):
        time, address = event["time_us"], event["addr"]
        if event["action"] == "free_completed":
            assert address not in alive
            alive[address] = event
            assert segment["address"] <= address
            assert address + event["size"] <= segment["address"] + segment["total_size"]
        elif event["action"] == "alloc":
            there = {(e["addr"] - BASE, e["size"], e["frames"][1]["name"]) for e in alive.values()}
            assert there == {
                (entry.offset, entry.size, f"request {k} of window {number}")
                for k, entry in planned(plan, number)
                if entry.lower <= time < entry.upper
            }
            assert alive.pop(address)["frames"] == event["frames"]
            checked += 1
    assert not alive and checked == len(planned(plan, number))
    assert history[0]["action"] == "segment_alloc" and history[0]["size"] == plan.arena


def test_at_one_moment_a_free_comes_before_the_request_that_takes_its_bytes():
    events = snapshot_of(by_hand(), 0, NAME)["device_traces"][0]
    assert [(e["action"], e["addr"] - BASE, e["size"], e["time_us"]) for e in events] == [
        ("segment_alloc", 0, 1536, 0),
        ("alloc", 0, 1000, 1),
        ("free_requested", 0, 1000, 4),
        ("free_completed", 0, 1000, 4),
        ("alloc", 0, 700, 4),
        ("alloc", 1024, 500, 5),
        ("free_requested", 0, 700, 8),
        ("free_completed", 0, 700, 8),
        ("free_requested", 1024, 500, 8),
        ("free_completed", 1024, 500, 8),
    ]
    assert {e["stream"] for e in events} == {7}


def test_torchs_own_viewer_takes_the_file(plan, path, out, capsys):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert cli.main(["export-snapshot", str(path), "-o", str(out)]) == 0
    capsys.readouterr()

    def data():  # they change what they are given
        return pickle.loads(out.read_bytes())

    count = len(planned(plan, 1))
    assert "segments: 1\n" in viz.segsum(data())
    text = viz.trace(data())
    assert f"= cudaMalloc({BASE}, " in text and text.count("free completed for") == count
    assert "MEM[" not in text  # a block outside of every segment
    for draw in (viz.memory, viz.segments):
        assert f"inactive;<gaps> {plan.arena}\n" in draw(data(), format_flamegraph=lambda x: x)
    assert "snapshot.pickle" in viz.trace_plot(data())
    assert "snapshot.pickle" in viz.trace_plot(data(), plot_segments=True)
    assert "snapshot.pickle" in viz.segment_plot(data())
    left = viz.filter_alloc_free_pairs(data())["device_traces"]
    assert [e["action"] for e in left[0]] == ["segment_alloc"]
    assert capsys.readouterr().out == ""  # where it complains of frees without a request


def test_the_web_viewers_reader_knows_every_opcode_of_the_pickle(plan, out):
    export_snapshot(out, plan, 1, NAME)
    operations = list(pickletools.genops(out.read_bytes()))
    assert {code.name for code, _, _ in operations} <= KNOWN_TO_THE_VIEWER
    numbers = [value for _, value, _ in operations if isinstance(value, int)]
    assert max(map(abs, numbers)) < 2**53  # what JavaScript holds exactly
    assert next(value for code, value, _ in operations if code.name == "PROTO") in (2, 3, 4)


def test_the_fields_are_those_of_a_recorded_snapshot(plan):
    # Test folders are no packages: files beside a test are loaded by path.
    place = Path(__file__).with_name("snapshot_writer.py")
    spec = importlib.util.spec_from_file_location("snapshot_writer", place)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    recorder = writer.Recorder()
    recorder.free(recorder.malloc(1000, where=[("train.py", 3, "step")]))
    recorded, ours = writer.snapshot(recorder), snapshot_of(plan, 0, NAME)

    def fields(value):
        if isinstance(value, dict):
            return {key: fields(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fields(item) for item in value[:1]]
        return type(value)

    assert ours.keys() == recorded.keys()
    for event in ours["device_traces"][0]:
        assert fields({**event, "frames": []}) == fields(
            {**recorded["device_traces"][0][1], "frames": []}
        )
        assert fields(event["frames"]) == fields(recorded["device_traces"][0][1]["frames"])
    (segment,), (like,) = ours["segments"], recorded["segments"]
    assert fields({**segment, "frames": []}) == fields(like)


# ---- names and notes


@pytest.mark.parametrize("number", [0, 1])
def test_frames_point_at_the_lines_of_the_plan_file(plan, path, number):
    lines = path.read_text().splitlines()
    window = plan.windows[number]
    allocs = [
        event
        for event in snapshot_of(plan, number, NAME)["device_traces"][0]
        if event["action"] == "alloc"
    ]
    for (k, entry), event in zip(planned(plan, number), allocs, strict=True):
        phase, request = event["frames"]
        assert phase["filename"] == request["filename"] == NAME
        assert json.loads(lines[phase["line"] - 1]) == ["p", *window.phases[entry.phase]]
        assert json.loads(lines[request["line"] - 1]) == ["r", *entry]
        assert request["name"] == f"request {k} of window {number}"


def test_requests_of_the_native_allocator_are_left_out_and_counted(plan):
    notes = [note["name"] for note in snapshot_of(by_hand(), 0, NAME)["external_annotations"]]
    assert notes[1:] == [
        "3 planned requests, 2,200 bytes over the iteration, "
        "in the first 1,536 bytes of the arena's 1,536",
        "left out: 2 requests, 164 bytes over the iteration, which the native allocator serves",
    ]
    assert "window 0 (hand.trace.jsonl) of a plan for rank 1 of 4 by a test" in notes[0]
    left = [e for e in plan.windows[1].entries if e.offset is None]
    assert any(e.stream == SIDE_STREAM for e in left) and any(e.upper is None for e in left)
    assert shown(plan, 1).native == len(left)


# ---- the command


def test_command_shows_the_window_that_fills_the_arena_or_the_one_asked_for(path, out, capsys):
    for words, number in ([], 1), (["--window", "0"], 0), (["--window", "1"], 1):
        assert cli.main(["export-snapshot", str(path), "-o", str(out), *words]) == 0
        said = capsys.readouterr().out
        assert f"window {number} ({number}.trace.jsonl)" in said and f"written to {out}" in said
        frames = read_snapshot(out)["device_traces"][0][1]["frames"]
        assert frames[1]["name"].endswith(f" of window {number}")


def test_of_windows_that_need_the_same_the_first_is_taken(plan):
    first, second = plan.windows
    assert fullest_window(plan) == 1
    assert fullest_window(dataclasses.replace(plan, windows=(second, first, second))) == 0
    assert shown(plan, 1).top == plan.arena > shown(plan, 0).top


def test_command_answers_mistakes_with_a_sentence(plan, path, out, tmp_path, capsys):
    before = path.read_bytes()
    damaged, text = tmp_path / "damaged.plan.jsonl", tmp_path / "text"
    damaged.write_bytes(before.replace(b'"r",', b'"r", ', 1))
    text.write_text("hello\n")
    for words, says in [
        ([tmp_path / "none", "-o", out], "No such file"),
        ([tmp_path, "-o", out], "Is a directory"),
        ([text, "-o", out], "this is no plan"),
        ([damaged, "-o", out], "damaged or edited"),
        ([path, "-o", path], "-o names the input itself"),
        ([path, "-o", tmp_path], "this is a folder"),
        ([path, "-o", tmp_path / "no" / "x"], "does not exist"),
        ([path, "-o", out, "--window", "2"], f"{path}: --window 2: the plan has no such window"),
        ([path, "-o", out, "--window", "-1"], "only 0 (0.trace.jsonl), 1 (1.trace.jsonl)"),
    ]:
        assert cli.main(["export-snapshot", *map(str, words)]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
    assert path.read_bytes() == before and not out.exists()


def test_a_window_without_planned_requests_is_refused(plan):
    nothing = Window(
        "idle.trace.jsonl", "2", {}, 1, 7, (Phase("other"),), (Entry(0, 9, 7, None, 0, None),)
    )
    with pytest.raises(PlanError, match=r"--window 2: nothing is planned in it \(idle"):
        snapshot_of(dataclasses.replace(plan, windows=(*plan.windows, nothing)), 2, NAME)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(out, monkeypatch):
    out.write_text("before")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_file.os, "replace", fail)
    with pytest.raises(PlanError, match=rf"{out}: No space left on device"):
        export_snapshot(out, by_hand(), 0, NAME)
    assert out.read_text() == "before"
    assert os.listdir(out.parent) == [out.name]


def test_exporting_needs_no_torch():
    code = "import sys, megatron_memo.profile.memory_viz; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
