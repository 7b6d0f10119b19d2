"""Where two traces part."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo import cli
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, START, Phase
from megatron_memo.profile.alignment import align, gaps
from megatron_memo.profile.difference import Kind, compare, explain
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, Trace, write_trace

PHASES = (START, Phase(LAYER, FORWARD, 0, 1), Phase(LAYER, BACKWARD, 0, 1))
HEADER = Header("profile", rounding=512)


def trace(*events, held=(), **header):
    """Events in short: "a100" asks for 100 bytes as a, "-a" gives a back, 1 enters phase 1.

    "a100@2": on stream 2.
    """
    numbers = {}
    held = tuple(Malloc(_number(numbers, name), size, 0, "weight") for name, size in held)
    made = []
    for event in events:
        if isinstance(event, int):
            made.append(Enter(event))
        elif event.startswith("-"):
            made.append(Free(_number(numbers, event[1])))
        else:
            size, _, stream = event[1:].partition("@")
            made.append(Malloc(_number(numbers, event[0]), int(size), int(stream or 0), "aten::mm"))
    return Trace(replace(HEADER, **header), PHASES, tuple(made), held)


def _number(numbers, name):
    return numbers.setdefault(name, len(numbers))


def kinds(a, b):
    return [(d.kind, d.a, d.b) for d in compare(a, b).differences]


BASE = ["a100", "b200", 1, "c300", "-c", "d400", 2, "-b", "e500", "-e", "-d", "-a"]


def changed(*edits):
    events = list(BASE)
    for at, value in edits:
        events[at] = value
    return trace(*events)


def test_ids_names_and_sources_do_not_matter():
    one = trace("a100", "b200", "-a", "c300", "-b", held=[("w", 50), ("v", 60)])
    other = Trace(
        Header("snapshot", rank=3, notes=("x",), rounding=512),
        (START,),
        (
            Malloc(77, 100, 0, ""),
            Malloc(5, 200, 0, "here"),
            Free(77),
            Malloc(6, 300, 0, ""),
            Free(5),
        ),
        (Malloc(9, 60, 0, ""), Malloc(1, 50, 0, "")),
    )
    found = compare(one, other)
    assert found.equal and not found.differences
    assert explain(found)[0] == "the traces are equal: 3 requests, 2 frees"


def test_a_resized_request_is_one_difference():
    a, b = trace(*BASE), changed((3, "c333"))
    assert kinds(a, b) == [(Kind.RESIZED, 3, 3)]
    lines = explain(compare(a, b))
    assert (
        "first difference: event 3 of A (layer 1 forward of micro-batch 0) asks for 300 bytes for "
        "aten::mm, event 3 of B (layer 1 forward of micro-batch 0) asks for 333 bytes for aten::mm"
    ) in lines
    assert "in all: 1 requests of another size" in lines


def test_another_stream():
    assert kinds(trace(*BASE), changed((3, "c300@2"))) == [(Kind.STREAM, 3, 3)]


def test_an_extra_request_is_one_difference_with_its_free():
    events = list(BASE)
    events.insert(4, "x64")
    events.insert(9, "-x")
    a, b = trace(*BASE), trace(*events)
    assert kinds(a, b) == [(Kind.ONLY_B, None, 4)]
    assert kinds(b, a) == [(Kind.ONLY_A, 4, None)]
    lines = explain(compare(a, b))
    assert (
        "first difference: event 4 of B (layer 1 forward of micro-batch 0) asks for 64 bytes for "
        "aten::mm, A does not before its event 4"
    ) in lines


def test_a_free_at_another_time_is_one_difference_both_ways():
    events = list(BASE)
    events.remove("-b")
    events.append("-b")
    a, b = trace(*BASE), trace(*events)
    assert kinds(a, b) == [(Kind.MOVED, 7, 11)]
    assert kinds(b, a) == [(Kind.MOVED, 11, 7)]
    assert (
        "first difference: event 7 of A (layer 1 backward of micro-batch 0) gives back the 200 "
        "bytes of event 1 for aten::mm, and B does so at another time: event 11 of B (layer 1 "
        "backward of micro-batch 0) gives back the 200 bytes of event 1 for aten::mm"
    ) in explain(compare(a, b))


def test_a_free_that_never_comes():
    events = [event for event in BASE if event != "-b"]
    assert kinds(trace(*BASE), trace(*events)) == [(Kind.FREED_ONLY_A, 7, None)]
    assert kinds(trace(*events), trace(*BASE)) == [(Kind.FREED_ONLY_B, None, 7)]


def test_blocks_of_one_size_given_back_in_another_order():
    a = trace("a100", "b100", "c7", "-a", "d9", "-b")
    b = trace("a100", "b100", "c7", "-b", "d9", "-a")
    assert kinds(a, b) == [(Kind.SWAPPED, 3, 3), (Kind.SWAPPED, 5, 5)]


def test_phases_count_where_both_traces_have_them():
    events = [event for event in BASE if event != 1]
    a, b = trace(*BASE), trace(*events)
    assert {kind for kind, _, _ in kinds(a, b)} == {Kind.PHASE}
    assert "are in other phases" in " ".join(explain(compare(a, b)))
    none = trace(*(event for event in BASE if not isinstance(event, int)))
    assert compare(a, none).equal and compare(none, b).equal


def test_what_was_there_before():
    a = trace("a100", "-w", held=[("w", 50), ("v", 60)])
    b = trace("a100", "-w", held=[("w", 50)])
    found = compare(a, b)
    assert not found.equal and not found.differences
    lines = explain(found)
    assert "at the beginning A alone holds 1 more blocks, 60 bytes; the largest has 60" in lines
    assert "the requests and frees of the window are equal" in lines
    lines = explain(compare(b, a))
    assert "at the beginning B alone holds 1 more blocks, 60 bytes; the largest has 60" in lines
    a = trace("a100", "b7", held=[("w", 50)])
    b = trace("a100", "-w", "b7", held=[("w", 50)])
    assert kinds(a, b) == [(Kind.FREED_ONLY_B, None, 1)]
    assert "50 bytes from before the window (weight)" in " ".join(explain(compare(a, b)))


def test_another_rounding_is_a_difference():
    found = compare(trace("a100"), trace("a100", rounding=64))
    assert not found.equal
    assert "A rounds requests up to 512 bytes, B to 64" in explain(found)


def test_the_peaks_are_told():
    assert explain(compare(trace("a512"), trace("a1024")))[-1] == (
        "peak: 512 bytes in A, 1,024 in B (+512 bytes, +100.00%)"
    )


def test_three_events_before_and_after_are_shown():
    events = [f"{chr(97 + k)}{k + 1}" for k in range(12)]
    other = [*events[:6], "y99", *events[7:]]
    lines = explain(compare(trace(*events), trace(*other)))
    at = lines.index("around event 6 of A:")
    shown = [line.replace(">", " ").split()[0] for line in lines[at + 1 : at + 8]]
    assert shown == ["3", "4", "5", "6", "7", "8", "9"]
    assert lines[at + 4].startswith("  >         6")
    assert "99 bytes" in lines[lines.index("around event 6 of B:") + 4]


def test_a_trace_that_ends_early():
    events = [f"{chr(97 + k)}{k + 1}" for k in range(12)]
    a, b = trace(*events), trace(*events[:9])
    assert kinds(a, b) == [(Kind.ONLY_A, k, None) for k in (9, 10, 11)]
    assert any(line.strip().endswith("the end") for line in explain(compare(a, b)))
    assert kinds(b, a) == [(Kind.ONLY_B, None, k) for k in (9, 10, 11)]


def test_every_size_another_is_told_as_resized():
    """A run at another sequence length asks in the same order."""
    other = [e if isinstance(e, int) or e[0] == "-" else f"{e}0" for e in BASE]
    assert {kind for kind, _, _ in kinds(trace(*BASE), trace(*other))} == {Kind.RESIZED}
    assert len(kinds(trace(*BASE), trace(*other))) == 5


def test_sizes_that_were_halved_are_not_mistaken_for_others():
    a, b = trace("a100", "b200", "c300", "d400"), trace("a50", "b100", "c150", "d200")
    assert kinds(a, b) == [(Kind.RESIZED, k, k) for k in range(4)]


def test_a_request_at_another_time_and_its_free_at_the_same():
    a = trace("x64", *(f"{name}{100 + k}" for k, name in enumerate("abcdefghij")), "-x", "z1")
    b = trace(*(f"{name}{100 + k}" for k, name in enumerate("abcdefghij")), "x64", "-x", "z1")
    assert kinds(a, b) == [(Kind.ONLY_A, 0, None), (Kind.ONLY_B, None, 10)]


# ---- hypothesis


def any_trace(rng, length, sizes=5, phased=False):
    alive, events, fresh = [], [], 0
    for _ in range(length):
        if alive and rng.random() < 0.45:
            events.append(Free(alive.pop(rng.randrange(len(alive)))))
        elif phased and rng.random() < 0.1:
            events.append(Enter(rng.randrange(len(PHASES))))
        else:
            alive.append(fresh)
            events.append(Malloc(fresh, rng.randint(1, sizes) * 100, rng.random() < 0.1, "x"))
            fresh += 1
    events.append(Malloc(fresh, 777, 0, "last"))
    return Trace(HEADER, PHASES, tuple(events))


def walk(found):
    """Requests and frees with their phase."""
    phase = 0
    for event in found.events:
        if isinstance(event, Enter):
            phase = event.phase
        else:
            yield event, phase


def is_phased(found):
    return any(phase for _, phase in walk(found))


def plain(found):
    """What equality means, said naively."""
    order, said = {}, []
    for event, phase in walk(found):
        if isinstance(event, Malloc):
            order[event.id] = len(order)
            said.append((event.size, event.stream, phase))
        else:
            said.append((order[event.id], phase))
    return said if is_phased(found) else [entry[:-1] for entry in said]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 40), st.booleans())
def test_traces_are_equal_where_their_plain_forms_are(rng, length, phased):
    seed = rng.randrange(10**6)
    a = any_trace(random.Random(seed), length, 2, phased)
    b = any_trace(
        random.Random(seed + rng.randrange(2)), rng.choice([length, length + 1]), 2, phased
    )
    if is_phased(a) != is_phased(b):
        return  # then phases are not compared
    found = compare(a, b)
    same = plain(a) == plain(b)
    assert found.equal == same
    assert compare(b, a).equal == same
    assert bool(explain(found))


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(5, 200))
def test_one_edit_is_found_where_it_is(rng, length):
    a = any_trace(rng, length, sizes=30)
    events = list(a.events)
    requests = [k for k, event in enumerate(events) if isinstance(event, Malloc)]
    at = rng.choice(requests)
    edit = rng.choice(["resize", "stream", "insert"])
    if edit == "resize":
        events[at] = events[at]._replace(size=31_000)
    elif edit == "stream":
        events[at] = events[at]._replace(stream=7)
    else:
        events.insert(at, Malloc(10**6, 31_000, 0, "new"))
    b = replace(a, events=tuple(events))
    first = compare(a, b).differences
    expected = {
        "resize": (Kind.RESIZED, at, at),
        "stream": (Kind.STREAM, at, at),
        "insert": (Kind.ONLY_B, None, at),
    }[edit]
    assert [(d.kind, d.a, d.b) for d in first] == [expected]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_pairs_are_equal_and_rise_and_gaps_are_the_rest(a, b):
    for agreement in (1, 3, 8):
        pairs = align(a, b, agreement)
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(pairs))
        rest = list(gaps(pairs, len(a), len(b)))
        assert sum(len(x) for x, _ in rest) == len(a) - len(pairs)
        assert sum(len(y) for _, y in rest) == len(b) - len(pairs)
        assert align(a, a, agreement) == [(k, k) for k in range(len(a))]


def test_a_changed_value_is_likelier_than_one_that_went_and_one_that_came():
    a, b = [5] * 1500 + [7], [6] + [5] * 1499 + [7]
    assert align(a, b) == [(k, k) for k in range(1, 1501)]


# ---- large ones and the command


def large(layers, edits=()):
    """A model whose layers all look the same."""
    events, fresh = [], 0
    kept = []
    for layer in range(layers):
        for k in range(60):
            size = 31 if edits and (layer, k) in edits else 1000 + k
            events.append(Malloc(fresh, size, 0, "op"))
            if k % 3:
                events.append(Free(fresh))
            else:
                kept.append(fresh)
            fresh += 1
    events += [Free(block) for block in reversed(kept)]
    return Trace(HEADER, (START,), tuple(events))


def test_a_million_events_are_compared_without_quadratic_work():
    a = large(8300)
    assert len(a.events) > 950_000
    b = large(8300, edits={(17, 5), (4000, 9), (8299, 59)})
    assert [d.kind for d in compare(a, b).differences] == [Kind.RESIZED] * 3


def test_nothing_in_common_is_no_slower():
    a, b = large(500), large(500, edits={(k, m) for k in range(500) for m in range(60)})
    assert len(compare(a, b).differences) == 30_000


def test_a_layer_less_is_found_at_the_end_of_the_layers():
    found = compare(large(40), large(39))
    first = found.differences[0]
    assert (first.kind, first.a, first.next_b) == (Kind.ONLY_A, 39 * 100, 39 * 100)


def test_command_says_by_its_status_what_it_found(tmp_path, capsys):
    a, b, broken = (tmp_path / name for name in ("a.trace.jsonl", "b.trace.jsonl.gz", "c"))
    write_trace(a, trace(*BASE))
    write_trace(b, changed((3, "c333")))
    broken.write_text("no trace")
    assert cli.main(["diff", str(a), str(a)]) == 0
    assert "the traces are equal" in capsys.readouterr().out
    assert cli.main(["diff", str(a), str(b)]) == 1
    assert "first difference: event 3 of A" in capsys.readouterr().out
    for words in ([a, broken], [broken, a], [a, tmp_path / "none"]):
        assert cli.main(["diff", *map(str, words)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("megatron-memo: error: ") and said.count("\n") == 1


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_words_of_its_own(kind):
    assert kind.value.split()[0] in ("requests", "frees", "events")
