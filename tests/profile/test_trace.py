"""The trace format: what is written reads back, what makes no sense is refused."""

import gzip
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.phases import BACKWARD, FORWARD, HEAD, LAYER, OPTIMIZER, PARTS, START, Phase
from megatron_memo.profile.trace import (
    LARGEST_SIZE,
    Enter,
    Free,
    Header,
    Life,
    Malloc,
    Trace,
    TraceError,
    read_trace,
    rounded,
    write_trace,
)

PHASES = (
    START,
    Phase(LAYER, FORWARD, 0, 1),
    Phase(LAYER, FORWARD, 0, 1, chunk=1),
    Phase(HEAD, FORWARD, 0),
    Phase(LAYER, BACKWARD, 0, 1, stage=1),
    Phase(OPTIMIZER),
)
HEADER = Header(
    "profile",
    device="cpu",
    rounding=64,
    rank=3,
    world_size=8,
    iteration=2,
    fingerprint={"layers": 2, "versions": {"torch": "2.14"}, "flags": ["a", "b"]},
    same_ranks=(3, 7),
    notes=("modelled: workspace", "Größe"),
)
HELD = (Malloc(100, 4096, 0, "weight"), Malloc(101, 512, 0, "bias"))
EVENTS = (
    Malloc(0, 10, 0, "aten::empty"),
    Enter(1),
    Malloc(1, 100, 0, "aten::mm"),
    Malloc(2, 65, 1, "workspace: cuBLAS"),
    Free(2),
    Enter(3),
    Malloc(3, 64, 0, "aten::mm"),
    Enter(4),
    Free(1),
    Free(100),
    Malloc(4, 1, 0, "aten::add"),
    Free(3),
    Enter(5),
    Free(4),
)
TRACE = Trace(HEADER, PHASES, EVENTS, HELD)


def lines(trace=TRACE):
    """The file of a trace as JSON values that a test may break."""
    said = [{"format": "megatron-memo trace", "version": 1, **vars(trace.header)}]
    said += [["p", *phase] for phase in trace.phases]
    said += [["h", *block] for block in trace.held]
    letter = {Malloc: "m", Free: "f", Enter: "e"}
    said += [[letter[type(event)], *event] for event in trace.events]
    return [*said, ["end", len(trace.events)]]


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.trace.jsonl"


@pytest.mark.parametrize("name", ["t.trace.jsonl", "t.trace.jsonl.gz"])
def test_a_trace_reads_back_as_it_was(tmp_path, name):
    path = tmp_path / name
    write_trace(path, TRACE)
    assert read_trace(path) == TRACE
    assert [p.name for p in tmp_path.iterdir()] == [name]
    packed = path.read_bytes()[:2] == b"\x1f\x8b"
    assert packed == name.endswith(".gz")


def test_the_file_is_the_documented_one(path):
    write_trace(path, TRACE)
    text = path.read_text()
    assert [json.loads(line) for line in text.splitlines()] == json.loads(json.dumps(lines()))
    write_lines(path, lines())
    assert read_trace(path) == TRACE


def test_a_header_may_leave_out_what_has_a_default(path):
    values = lines(Trace(Header("allocator"), PHASES, EVENTS, HELD))
    values[0] = {"format": "megatron-memo trace", "version": 1, "source": "allocator"}
    assert read_trace(write_lines(path, values)).header == Header("allocator")


def test_a_failed_write_leaves_what_was_there(path, monkeypatch):
    write_trace(path, TRACE)
    before = path.read_bytes()
    bad = Trace(Header("profile", fingerprint={"x": object()}), PHASES, EVENTS, HELD)
    with pytest.raises(TypeError):
        write_trace(path, bad)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_trace(path, TRACE)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


# ---- hypothesis

words = st.text(max_size=12)
numbers = st.one_of(st.none(), st.integers(0, 99))
phases = st.builds(Phase, st.sampled_from(PARTS), st.sampled_from(("", FORWARD, BACKWARD)), numbers)


@st.composite
def traces(draw):
    """Any trace: blocks are asked for and given back in any order, some before, some never."""
    declared = (START, *draw(st.lists(phases, max_size=3)))
    fresh = iter(range(10**6))
    sizes, streams = st.integers(1, LARGEST_SIZE), st.integers(0, 3)
    held = tuple(
        Malloc(next(fresh), draw(sizes), draw(streams), draw(words))
        for _ in range(draw(st.integers(0, 3)))
    )
    alive = [block.id for block in held]
    events = []
    for step in draw(st.lists(st.integers(0, 2), max_size=30)):
        if step == 0 and alive:
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        elif step == 1:
            events.append(Enter(draw(st.integers(0, len(declared) - 1))))
        else:
            alive.append(next(fresh))
            events.append(Malloc(alive[-1], draw(sizes), draw(streams), draw(words)))
    events.append(Malloc(next(fresh), draw(sizes), 0, ""))
    header = Header(
        draw(words),
        rounding=draw(st.sampled_from([1, 64, 512])),
        fingerprint=draw(st.dictionaries(words, st.one_of(numbers, words, st.lists(words)))),
        same_ranks=tuple(draw(st.lists(st.integers(0, 9)))),
        notes=tuple(draw(st.lists(words, max_size=2))),
    )
    return Trace(header, declared, tuple(events), held)


@settings(max_examples=150, deadline=None)
@given(traces(), st.booleans())
def test_every_trace_reads_back(tmp_path_factory, trace, packed):
    path = tmp_path_factory.getbasetemp() / ("any.trace.jsonl" + ".gz" * packed)
    write_trace(path, trace)
    assert read_trace(path) == trace


@settings(max_examples=150, deadline=None)
@given(traces())
def test_the_peak_is_the_largest_sum_of_blocks_alive_at_once(trace):
    blocks = trace.blocks()
    most = 0
    for time in range(len(trace.events)):
        alive = [b for b in blocks if b.lower <= time and (b.upper is None or time < b.upper)]
        most = max(most, sum(rounded(b.size, trace.header.rounding) for b in alive))
    assert trace.peak() == most


@settings(max_examples=100, deadline=None)
@given(traces(), st.data())
def test_every_cut_is_noticed(tmp_path_factory, trace, data):
    path = tmp_path_factory.getbasetemp() / "cut.trace.jsonl"
    write_trace(path, trace)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(TraceError):
        read_trace(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_an_error_of_one_line_or_another_valid_trace(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / (
        "bad.trace.jsonl" + data.draw(st.sampled_from(["", ".gz"]))
    )
    write_trace(path, TRACE)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    said = f"{path}: "
    try:
        read_trace(path)
    except TraceError as error:
        said = str(error)
    assert said.startswith(f"{path}: ") and "\n" not in said


# ---- what a trace says


def test_blocks_have_their_times_phases_and_lives():
    blocks = {block.id: block for block in TRACE.blocks()}
    assert list(blocks) == [0, 1, 2, 3, 4]
    assert (blocks[1].lower, blocks[1].upper, blocks[1].phase) == (2, 8, 1)
    assert (blocks[0].lower, blocks[0].upper, blocks[0].phase) == (0, None, 0)
    assert blocks[2].stream == 1 and blocks[2].what == "workspace: cuBLAS"
    assert {block.id: block.life for block in blocks.values()} == {
        0: Life.PERSISTENT,  # never given back
        1: Life.SKELETAL,  # from a layer's forward to a backward
        2: Life.TRANSIENT,  # within a phase
        3: Life.TRANSIENT,  # from the head to a backward: no layer's
        4: Life.TRANSIENT,  # from a backward to the optimizer
    }


@pytest.mark.parametrize(
    ("born", "died", "life"),
    [
        (Phase(LAYER, FORWARD, 0, 1, 2), Phase(LAYER, BACKWARD, 0, 1, 2), Life.SKELETAL),
        (Phase(LAYER, FORWARD, 0, 1), Phase(HEAD, BACKWARD, 0), Life.SKELETAL),
        (Phase(LAYER, FORWARD, 0, 1), Phase(LAYER, FORWARD, 0, 2), Life.TRANSIENT),
        (Phase(LAYER, FORWARD, 0, 1), Phase(OPTIMIZER), Life.TRANSIENT),
        (Phase(LAYER, BACKWARD, 0, 1), Phase(LAYER, BACKWARD, 0, 1), Life.TRANSIENT),
        (START, Phase(LAYER, BACKWARD, 0, 1), Life.TRANSIENT),
    ],
)
def test_skeletal_is_what_a_layers_forward_leaves_for_a_backward(born, died, life):
    events = (Enter(1), Malloc(0, 1, 0, ""), Enter(2), Free(0))
    (block,) = Trace(HEADER, (START, born, died), events).blocks()
    assert block.life is life


def test_the_peak_counts_rounded_bytes_of_the_windows_own_requests():
    assert TRACE.peak() == 64 + 128 + 128
    # A held block given back lowers nothing that counts.
    events = (Free(100), Malloc(0, 1, 0, ""), Malloc(1, 65, 0, ""))
    assert Trace(HEADER, PHASES, events, HELD).peak() == 64 + 128


@pytest.mark.parametrize(
    ("size", "rounding", "bytes_"), [(1, 512, 512), (512, 512, 512), (513, 512, 1024), (7, 1, 7)]
)
def test_sizes_are_rounded_up(size, rounding, bytes_):
    assert rounded(size, rounding) == bytes_


@pytest.mark.parametrize(
    ("events", "held", "says"),
    [
        ((), (), "empty"),
        ((Enter(0),), HELD, "empty"),
        ((Malloc(0, 0, 0, ""),), (), "event 0: block 0 of 0 bytes"),
        ((Malloc(0, -5, 0, ""),), (), "block 0 of -5 bytes"),
        ((Malloc(0, LARGEST_SIZE + 1, 0, ""),), (), r"from 1 to 2\^53"),
        ((), (Malloc(0, 0, 0, ""),), "held block: block 0 of 0 bytes"),
        ((Malloc(0, 5, 0, ""), Malloc(0, 5, 0, "")), (), "event 1: block id 0 is used twice"),
        ((Malloc(0, 5, 0, ""), Free(0), Malloc(0, 5, 0, "")), (), "event 2: block id 0"),
        ((Malloc(100, 5, 0, ""),), HELD, "event 0: block id 100 is used twice"),
        ((), (HELD[0], HELD[0]), "held block: block id 100 is used twice"),
        ((Free(0), Malloc(0, 5, 0, "")), (), "event 0: free of block 0 before its malloc"),
        ((Malloc(0, 5, 0, ""), Free(0), Free(0)), (), "event 2: block 0 is given back twice"),
        ((Free(100), Free(100)), HELD, "event 1: block 100 is given back twice"),
        ((Malloc(0, 5, 0, ""), Enter(6)), (), "event 1: phase 6 is not declared"),
        ((Malloc(0, 5, 0, ""), Enter(-1)), (), "event 1: phase -1 is not declared"),
    ],
)
def test_events_that_contradict_each_other_are_refused(path, events, held, says):
    with pytest.raises(TraceError, match=says):
        Trace(HEADER, PHASES, events, held)
    values = lines()[: 1 + len(PHASES)] + [["h", *block] for block in held]
    letter = {Malloc: "m", Free: "f", Enter: "e"}
    values += [[letter[type(event)], *event] for event in events]
    with pytest.raises(TraceError, match=says):
        read_trace(write_lines(path, [*values, ["end", len(events)]]))


@pytest.mark.parametrize("phases", [(), PHASES[1:]])
def test_the_first_phase_is_the_start(phases):
    with pytest.raises(TraceError, match="the first phase"):
        Trace(HEADER, phases, (Malloc(0, 1, 0, ""),))


@pytest.mark.parametrize("rounding", [0, -512])
def test_a_rounding_below_one_is_refused(rounding):
    with pytest.raises(TraceError, match="rounding"):
        Trace(Header("profile", rounding=rounding), PHASES, EVENTS, HELD)


# ---- broken files

OPENED = '{"format": "megatron-memo trace", "version": 1, "source": "profile"'
REQUEST_LINE = 1 + len(PHASES) + len(HELD)


def changed(line, value):
    """The file with a line replaced."""
    text = [json.dumps(v) for v in lines()]
    text[line] = value
    return "\n".join(text) + "\n"


BROKEN_FILES = {
    "nothing": ("", "this is no trace"),
    "blank": ("\n\n", "this is no trace"),
    "a csv": ("id,lower,upper,size\n1,0,1,5\n", "this is no trace"),
    "another json": ('{"a": 1}\n', "this is no trace"),
    "a list": ("[1]\n", "this is no trace"),
    "no version": (changed(0, '{"format": "megatron-memo trace"}'), "version None"),
    "newer": (changed(0, OPENED.replace("1", "2") + "}"), "version 2 of the format"),
    "no source": (changed(0, OPENED.replace(', "source": "profile"', "") + "}"), "the header"),
    "unknown field": (changed(0, OPENED + ', "colour": 3}'), "line 1: .*colour"),
    "text as rank": (changed(0, OPENED + ', "rank": "3"}'), "line 1: .*'3'"),
    "fraction as rounding": (changed(0, OPENED + ', "rounding": 1.5}'), "line 1: .*1.5"),
    "true as world size": (changed(0, OPENED + ', "world_size": true}'), "line 1: .*True"),
    "number as notes": (changed(0, OPENED + ', "notes": 3}'), "line 1"),
    "list as fingerprint": (changed(0, OPENED + ', "fingerprint": [1]}'), "line 1"),
    "number as source": (changed(0, OPENED.replace('"profile"', "5") + "}"), "line 1"),
    "text as iteration": (changed(0, OPENED + ', "iteration": "x"}'), "line 1"),
    "text as ranks": (changed(0, OPENED + ', "same_ranks": ["x"]}'), "line 1"),
    "unknown kind": (changed(9, '["x", 1]'), "line 10: 'x' is no kind"),
    "no list": (changed(9, "7"), "line 10: '7' is no line"),
    "empty list": (changed(9, "[]"), r"line 10: '\[\]' is no line"),
    "blank line": (changed(9, ""), "line 10"),
    "half a line": (changed(9, '["m", 5'), "line 10"),
    "size missing": (changed(REQUEST_LINE, '["m", 0, 0, "x"]'), f"line {REQUEST_LINE + 1}"),
    "size a fraction": (changed(REQUEST_LINE, '["m", 0, 1.5, 0, "x"]'), "no line of a trace"),
    "size a text": (changed(REQUEST_LINE, '["m", 0, "9", 0, "x"]'), "no line of a trace"),
    "size true": (changed(REQUEST_LINE, '["m", 0, true, 0, "x"]'), "no line of a trace"),
    "size infinite": (changed(REQUEST_LINE, '["m", 0, Infinity, 0, "x"]'), "no line of a trace"),
    "size absurd": (changed(REQUEST_LINE, f'["m", 0, {"9" * 6000}, 0, "x"]'), "no line of"),
    "size too large": (changed(REQUEST_LINE, '["m", 0, 9007199254740993, 0, ""]'), r"2\^53"),
    "too much": (changed(REQUEST_LINE, '["m", 0, 1, 0, "x", 5]'), "no line of a trace"),
    "free of a list": (changed(REQUEST_LINE + 4, '["f", [2]]'), "no line of a trace"),
    "phase of a text": (changed(REQUEST_LINE + 1, '["e", "1"]'), "no line of a trace"),
    "short phase": (changed(2, '["p", "layer", "forward", 0]'), "line 3"),
    "phase of fractions": (changed(2, '["p", "layer", "forward", 0.5, 1, 2, 3]'), "line 3"),
    "deep nesting": (changed(9, "[" * 100_000), "line 10"),
    "deep header": (changed(0, "[" * 100_000), "this is no trace"),
    "no end": ("\n".join(json.dumps(v) for v in lines()[:-1]) + "\n", "cut off"),
    "wrong count": (changed(-1, '["end", 3]'), "events announced, 14 read"),
    "end without count": (changed(-1, '["end"]'), "events announced"),
    "something after the end": (changed(-1, '["end", 14]') + '["f", 3]\n', "after the end"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_files_are_refused_in_one_line_that_names_the_file(path, name):
    text, says = BROKEN_FILES[name]
    path.write_text(text)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    packed = path.with_name("t.trace.jsonl.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(TraceError, match=says):
        read_trace(packed)


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"none.*No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TraceError, match="no text file"):
        read_trace(noise)


def test_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "t.trace.jsonl.gz"
    write_trace(path, TRACE)
    whole = path.read_bytes()
    for damaged in (b"plain text", whole[:-9], whole[: len(whole) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(str(path))
    packed = whole.index(b"\0", 10) + 1  # after the name of the file
    for place in range(packed, len(whole) - 8, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        with pytest.raises(TraceError):
            read_trace(path)


@pytest.mark.parametrize(
    "change", [dict(device="tpu"), dict(rank=-1), dict(world_size=0), dict(rounding=0)]
)
def test_a_header_that_cannot_be_is_refused(change):
    header = Header("profile", **change)
    with pytest.raises(TraceError, match=r"makes no sense|is none of"):
        Trace(header, (START,), (Malloc(1, 64, 0, "x"),))
