"""Traces from PyTorch's memory snapshots."""

import importlib.util
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo import cli
from megatron_memo.profile.snapshot import SnapshotError, import_snapshot
from megatron_memo.profile.snapshot_window import Repeat, find_repeat, iteration_start
from megatron_memo.profile.trace import Free, Malloc, read_trace


def _load_writer():
    # Test folders are no packages: files beside a test are loaded by path.
    spec = importlib.util.spec_from_file_location(
        "snapshot_writer", Path(__file__).with_name("snapshot_writer.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = _load_writer()
Recorder, dump = writer.Recorder, writer.dump

STEP = ("/home/me/train.py", 30, "train_step")
LINEAR = ("/env/torch/nn/modules/linear.py", 134, "forward")
LAYERS = 4


def iteration(r, sizes=(1000, 2000), streams=(0, 0)):
    """One step of a small model: layers keep two blocks each until their backward."""
    kept = []
    for _ in range(LAYERS):
        passing = r.malloc(sizes[0] * 4, streams[1], [LINEAR, STEP])
        kept.append([r.malloc(size, streams[0], [STEP]) for size in sizes])
        r.free(passing, used_elsewhere=streams[1] != 0)
    r.streams_are_done()
    logits = r.malloc(50_000, streams[0])
    r.free(logits)
    for blocks in reversed(kept):
        gradient = r.malloc(sizes[1])
        for block in blocks:
            r.free(block)
        r.free(gradient)
    for _ in range(3):  # the optimizer
        r.free(r.malloc(700))


def run(iterations=4, device=0, max_entries=None, warm_up=True, **more):
    r = Recorder(device, max_entries)
    r.weights = [r.malloc(4096), r.malloc(8192)]
    if warm_up:
        r.free(r.malloc(33))
        r.state = r.malloc(100_000)
    for _ in range(iterations):
        iteration(r, **more)
    return r


def shape(trace):
    """Events with blocks numbered by first appearance."""
    number = {block.id: f"h{k}" for k, block in enumerate(trace.held)}
    said = []
    for event in trace.events:
        if isinstance(event, Malloc):
            number[event.id] = len(number) - len(trace.held)
            said.append((event.size, event.stream))
        else:
            said.append(number[event.id])
    return said


def alone(**more):
    """What one iteration asks for, as a trace that was cut out by hand."""
    r = Recorder()
    iteration(r, **more)
    return r


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.pickle"


# ---- which events


def test_the_last_full_iteration_is_found_and_said(path, tmp_path):
    trace = import_snapshot(dump(path, run()))
    expected = import_snapshot(dump(tmp_path / "one.pickle", alone()), start=0)
    assert shape(trace) == shape(expected)
    assert trace.peak() == expected.peak() > 0
    assert trace.header.source == "snapshot" and trace.header.device == "cuda"
    assert "the last full iteration" in trace.header.notes[0]
    assert "4 times in a row" in trace.header.notes[0]


def test_a_run_that_goes_on_after_its_last_full_iteration(path):
    whole = shape(import_snapshot(dump(path, run())))
    r = run()
    kept = [r.malloc(4000), r.malloc(1000), r.malloc(2000)]
    assert shape(import_snapshot(dump(path, r))) == whole
    for block in kept:
        r.free(block)
    for size in (11, 12, 13, 14):  # and something else at the very end
        r.malloc(size)
    assert shape(import_snapshot(dump(path, r))) == whole


def test_an_iteration_with_several_micro_batches_is_taken_whole(path):
    def two_micro_batches(r):
        for _ in range(2):
            kept = [r.malloc(1000 + k) for k in range(5)]
            for block in kept:
                r.free(block)
        gradient = r.malloc(77_777)
        r.free(gradient)

    r = Recorder()
    for _ in range(3):
        two_micro_batches(r)
    sizes = [e.size for e in import_snapshot(dump(path, r)).events if isinstance(e, Malloc)]
    assert sorted(sizes) == sorted([1000 + k for k in range(5)] * 2 + [77_777])


def test_frees_at_other_times_fall_back_on_the_requests(path):
    """Python's collector gives cyclic garbage back whenever it likes."""
    r = Recorder()
    rng = random.Random(0)
    for _ in range(4):
        garbage = [r.malloc(300 + k) for k in range(6)]
        order = list(garbage)
        rng.shuffle(order)
        for block in order:
            r.free(block)
        r.malloc(9000)
    trace = import_snapshot(dump(path, r))
    assert "requests alone" in trace.header.notes[0]
    assert sum(isinstance(e, Malloc) for e in trace.events) == 7


def test_without_a_repeat_the_user_is_asked(path):
    r = Recorder()
    for size in range(1, 60):
        r.free(r.malloc(size * size))
    dump(path, r)
    with pytest.raises(SnapshotError, match=r"no iteration repeats in the 178 events.*--from"):
        import_snapshot(path)
    trace = import_snapshot(path, start=1, stop=7)
    assert [e.size for e in trace.events if isinstance(e, Malloc)] == [1, 4]
    assert "--from" in trace.header.notes[0]


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (9, 3), (-1, 4), (0, 10**6), (10**6, None)])
def test_events_that_are_not_there_are_refused(path, start, stop):
    dump(path, run())
    with pytest.raises(SnapshotError, match="the history has the events 0 to"):
        import_snapshot(path, start=start, stop=stop)


def test_a_window_without_a_request_is_refused(path):
    dump(path, run())
    with pytest.raises(SnapshotError, match="hold no request"):
        import_snapshot(path, start=0, stop=1)  # the segment's own


def test_the_device_is_the_only_one_with_a_history_or_asked_for(path):
    dump(path, run(device=2))
    assert "of device 2" in import_snapshot(path).header.notes[0]
    with pytest.raises(SnapshotError, match="--device 0: no history of that device, only of 2"):
        import_snapshot(path, device=0)
    dump(path, run(device=0), run(device=1, sizes=(10, 20)))
    with pytest.raises(SnapshotError, match=r"devices 0, 1\. Choose with --device"):
        import_snapshot(path)
    sizes = {e.size for e in import_snapshot(path, device=1).events if isinstance(e, Malloc)}
    assert {10, 20} < sizes and 1000 not in sizes


# ---- what lives


def test_blocks_from_before_are_held_and_addresses_are_told_apart(path):
    r = run()
    trace = import_snapshot(dump(path, r))
    assert sorted(block.size for block in trace.held) == [4096, 8192, 100_000]
    blocks = trace.blocks()
    assert all(block.upper is not None for block in blocks)
    assert len({block.id for block in blocks}) == len(blocks)
    addresses = {e["addr"] for e in r.entries if e["action"] == "alloc"}
    assert len(addresses) < len(blocks)  # or nothing was told apart here


def test_a_block_given_back_after_the_window_outlives_it(path):
    r = Recorder()
    a = r.malloc(1000)
    r.free(r.malloc(10))
    b = r.malloc(2000)
    r.free(a)
    r.free(b)
    trace = import_snapshot(dump(path, r), start=2, stop=6)
    assert [block.size for block in trace.held] == [1000]
    assert [(block.size, block.upper is None) for block in trace.blocks()] == [
        (10, False),
        (2000, True),
    ]
    trace = import_snapshot(path, start=5, stop=8)
    assert [e.size for e in trace.events if isinstance(e, Malloc)] == [2000]
    assert [e for e in trace.events if isinstance(e, Free)] == [Free(trace.held[0].id)]


def test_a_full_ring_buffer_loses_the_oldest_and_says_so(path):
    whole = import_snapshot(dump(path, run(6)))
    cut = import_snapshot(dump(path, run(6, max_entries=len(run(6).entries) // 2 + 5)))
    assert shape(cut) == shape(whole) and cut.peak() == whole.peak()
    assert sorted(b.size for b in cut.held) == sorted(b.size for b in whole.held)
    assert any("older than the history" in note for note in cut.header.notes)
    assert not any("older than the history" in note for note in whole.header.notes)


def test_recording_that_was_off_for_a_while(path):
    r = Recorder()
    a = r.malloc(1000)
    r.recording = False
    r.free(a)
    r.recording = True
    b = r.malloc(1000)
    assert a == b
    trace = import_snapshot(dump(path, r), start=0)
    events = list(trace.events)
    assert events == [Malloc(0, 1000, 0, "unknown"), Free(0), Malloc(1, 1000, 0, "unknown")]
    assert any("1 frees are missing" in note for note in trace.header.notes)


def test_a_block_lives_until_other_streams_are_done_with_it(path):
    r = Recorder()
    a = r.malloc(1000, stream=0x55AA)
    r.free(a, used_elsewhere=True)
    b = r.malloc(1000)
    assert a != b
    r.streams_are_done()
    trace = import_snapshot(dump(path, r), start=0)
    kinds = [type(event).__name__ for event in trace.events]
    assert kinds == ["Malloc", "Malloc", "Free"] and trace.events[2] == Free(0)
    assert any("1 blocks lived on" in note for note in trace.header.notes)


def test_streams_are_numbered_so_that_runs_compare(path, tmp_path):
    one = import_snapshot(dump(path, run(streams=(0, 0x7F12))))
    two = import_snapshot(dump(tmp_path / "t.pickle", run(streams=(0, 0x9988))))
    assert one.events == two.events
    assert {e.stream for e in one.events if isinstance(e, Malloc)} == {0, 1}


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_recorders_that_leave_out_one_of_the_two_frees(path, left_out):
    whole = shape(import_snapshot(dump(path, run())))
    snapshot = writer.snapshot(run())
    snapshot["device_traces"][0] = [
        e for e in snapshot["device_traces"][0] if e["action"] != left_out
    ]
    path.write_bytes(pickle.dumps(snapshot))
    assert shape(import_snapshot(path)) == whole


def test_what_names_the_line_and_who_called_torch(path):
    trace = import_snapshot(dump(path, run()))
    said = {e.what for e in trace.events if isinstance(e, Malloc)}
    assert said == {
        "forward (linear.py:134) in train_step (train.py:30)",
        "train_step (train.py:30)",
        "unknown",
    }
    r = Recorder()
    r.malloc(5, where=[("??", 0, "at::empty"), ("a.cpp", 1, "x"), ("/a/b.py", 2, "f")])
    r.malloc(6, where=[("??", 0, "at::empty_cuda"), ("a.cpp", 1, "x")])
    said = [e.what for e in import_snapshot(dump(path, r), start=0).events]
    assert said == ["f (b.py:2)", "at::empty_cuda"]


def test_failures_and_settings_are_noted(path):
    r = run()
    r.out_of_memory(10**12)
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "roundup_power2_divisions": {"1": 4},
    }
    notes = " ".join(import_snapshot(dump(path, r, settings=settings)).header.notes)
    assert f"failed for want of memory at event {len(r.entries) - 1}" in notes
    assert "expandable_segments:True" in notes and "roundup_power2_divisions" in notes


# ---- what is refused


def test_a_snapshot_without_history_says_how_to_record_one(path):
    r = run()
    r.entries.clear()
    dump(path, r)
    with pytest.raises(SnapshotError, match=r"no history of requests.*_record_memory_history"):
        import_snapshot(path)


class Evil:
    def __reduce__(self):
        return os._exit, (3,)  # a reader that runs it does not come back


BROKEN = {
    "a command in it": (pickle.dumps(Evil()), r"asks for (posix|os)\._exit"),
    "a class in it": (pickle.dumps({"device_traces": [Path("x")]}), "asks for .*Path"),
    "not a dictionary": (pickle.dumps([1, 2]), "no memory snapshot"),
    "another dictionary": (pickle.dumps({"model": 1}), "no memory snapshot"),
    "a list of segments": (pickle.dumps([{"address": 1, "blocks": []}]), "no memory snapshot"),
    "empty": (b"", "no pickle, or a damaged one"),
    "text": (b"id,lower,upper\n", "no pickle, or a damaged one"),
    "noise": (random.Random(3).randbytes(999), "no pickle, or a damaged one"),
    "zip of a checkpoint": (b"PK\x03\x04" + bytes(60), "no pickle, or a damaged one"),
    "no action": (pickle.dumps({"device_traces": [[{"addr": 1}]]}), "event 0: it has no action"),
    "history of numbers": (pickle.dumps({"device_traces": [[1]]}), "event 0: it has no action"),
    "a text as history": (pickle.dumps({"device_traces": ["abc"]}), "the history is no list"),
    "no size": (
        pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "stream": 0}]]}),
        "event 0: size is None",
    ),
    "odd frames": (
        pickle.dumps(
            {
                "device_traces": [
                    [{"action": "alloc", "addr": 1, "size": 5, "stream": 0, "frames": [{"f": 1}]}]
                ]
            }
        ),
        "stack frames are not as torch",
    ),
    "absurd size": (
        pickle.dumps(
            {"device_traces": [[{"action": "alloc", "addr": 1, "size": 2**60, "stream": 0}]]}
        ),
        r"must be from 1 to 2\^53",
    ),
    "odd segments": (
        pickle.dumps(
            {
                "device_traces": [[{"action": "alloc", "addr": 1, "size": 5, "stream": 0}]],
                "segments": [{"address": 5}],
            }
        ),
        "the segments are not as torch",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line_that_names_the_file(path, name):
    data, says = BROKEN[name]
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=says) as caught:
        import_snapshot(path, start=0)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_cut_pickle_is_refused(path):
    data = pickle.dumps(writer.snapshot(run()))
    for size in (10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(SnapshotError, match="no pickle, or a damaged one"):
            import_snapshot(path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_no_bytes_get_past_the_reader(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError):
        import_snapshot(path)


# ---- the command


def test_command_writes_a_trace_that_reads_back(path, tmp_path, capsys):
    out = tmp_path / "t.trace.jsonl.gz"
    dump(path, run())
    assert cli.main(["import-snapshot", str(path), "-o", str(out)]) == 0
    assert read_trace(out) == import_snapshot(path)
    said = capsys.readouterr().out
    assert "the last full iteration" in said and f"written to {out}" in said
    assert cli.main(["import-snapshot", str(path), "-o", str(out), "--from", "3", "--to", "9"]) == 0
    assert "chosen by --from and --to" in read_trace(out).header.notes[0]


def test_command_answers_mistakes_with_a_sentence(path, tmp_path, capsys):
    dump(path, run())
    before = path.read_bytes()
    for words, says in [
        ([str(tmp_path / "none"), "-o", str(tmp_path / "t")], "No such file"),
        ([str(tmp_path), "-o", str(tmp_path / "t")], "Is a directory"),
        ([str(path), "-o", str(tmp_path / "no" / "t")], "No such file"),
        ([str(path), "-o", str(path)], "the snapshot itself"),
        ([str(path), "-o", str(tmp_path / "t"), "--device", "-1"], "--device -1"),
    ]:
        assert cli.main(["import-snapshot", *words]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
    assert path.read_bytes() == before
    assert not (tmp_path / "t").exists()


def test_importing_needs_no_torch():
    import subprocess

    code = "import sys, megatron_memo.profile.snapshot; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_itself_reads_what_the_writer_writes(path):
    """Or the tests would hold the importer to a format of their own."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    r = run(2, streams=(0, 7))
    r.out_of_memory(10**12)
    data = pickle.loads(dump(path, r).read_bytes())
    assert "segments: 1" in viz.segsum(data)
    text = viz.trace(data)
    assert text.count("free completed") == sum(e["action"] == "free_completed" for e in r.entries)
    assert "OutOfMemoryError" in text
    assert "snapshot.pickle" in viz.trace_plot(data)
    flame = viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "active_allocated" in flame


# ---- periods


@settings(max_examples=200, deadline=None)
@given(
    period=st.lists(st.integers(0, 5), min_size=3, max_size=60).filter(lambda p: len(set(p)) > 2),
    times=st.integers(3, 6),
    before=st.lists(st.integers(10, 12), max_size=8),
    after=st.lists(st.integers(20, 22), max_size=8),
)
def test_a_sequence_that_repeats_is_found(period, times, before, after):
    tokens = [*before, *(period * times), *after]
    found = find_repeat(tokens)
    assert found is not None
    inside = tokens[found.start : found.stop]
    assert len(inside) >= 2 * found.period
    assert inside[found.period :] == inside[: -found.period]
    # The planted stretch, or one that is at least as long.
    assert found.stop - found.start >= len(period) * times


def test_layers_that_repeat_are_no_iterations():
    step = [0] + [1, 2, 3] * 10 + [4] + [5, 6] * 10 + [7]
    found = find_repeat([9, 9, *step * 3, 1, 2])
    assert found.period == len(step)
    assert found.times == 3


def test_a_disturbed_iteration_is_passed_over():
    step = list(range(40))
    tokens = step * 3 + step[:20] + [99] + step[20:] + step * 4 + [7, 7]
    assert find_repeat(tokens).period == 40
    assert find_repeat(tokens).stop == len(tokens) - 2
    tokens = step * 6 + step[:20] + [99] + step[20:] + step * 2 + [7, 7]
    assert find_repeat(tokens).stop == len(tokens) - 2  # the last ones, if not the longest


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], list(range(100))])
def test_nothing_repeats(tokens):
    assert find_repeat(tokens) is None


def test_an_iteration_begins_at_the_fewest_bytes_before_the_climb():
    # fewest bytes: between steps, and between the temporaries of the optimizer that ends a step
    alive = np.array([5, 9, 7, 3, 4, 3, 4, 3, 6] * 3)
    start = iteration_start(Repeat(0, 27, 9), alive)
    assert start == 9 + 7 or (start - 7) % 9 == 0
    assert alive[start] == 3 and alive[start + 1] == 6


def test_a_million_events_take_seconds():
    step = [k % 977 for k in range(20_000)] + [5000] + [k % 131 for k in range(13_000)]
    found = find_repeat(step * 30)
    assert found.period == len(step) and found.times == 30
