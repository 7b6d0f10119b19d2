"""Layers that should be alike are told from those that may differ."""

import pytest

from megatron_memo.phases import BACKWARD, FORWARD, LAYER, START, Phase
from megatron_memo.profile.periodicity import (
    OF_BUCKETS,
    PeriodicityError,
    check_same,
    describe,
    layer_kinds,
    layer_passes,
)
from megatron_memo.profile.trace import Enter, Free, Header, Malloc, Trace


def trace_of(layers, *, micro_batches=1, iteration=2, change=None, retire=1, full=None):
    """Layers that keep one block for backward and use one for a while in each direction.

    A layer's kept block is given back `retire` layers later, or in backward. In backward of a layer
    of `full`, DDP looks at a bucket of gradients, before the layer's own request or behind it.
    """
    phases, events, number = [START], [], 0
    change, full = change or {}, full or {}

    def enter(direction, batch, layer):
        phase = Phase(LAYER, direction, batch, layer)
        if phase not in phases:
            phases.append(phase)
        events.append(Enter(phases.index(phase)))

    def ask(size, what):
        nonlocal number
        events.append(Malloc(number, size, 0, what))
        number += 1
        return number - 1

    for batch in range(micro_batches):
        kept = {}
        for layer in range(1, layers + 1):
            enter(FORWARD, batch, layer)
            if layer - retire in kept and layer <= layers - retire:
                events.append(Free(kept.pop(layer - retire)))
            kept[layer] = ask(1000, "keep")
            events.append(Free(ask(change.get((batch, layer), 64), "use")))
        for layer in range(layers, 0, -1):
            enter(BACKWARD, batch, layer)
            if full.get(layer) is True:
                events += [Free(ask(4, what)) for what in OF_BUCKETS]
            block = ask(128, "gradient")
            if full.get(layer) is False:
                events += [Free(ask(4, what)) for what in OF_BUCKETS]
            events.append(Free(block))
            if layer in kept:
                events.append(Free(kept.pop(layer)))
    header = Header("profile", iteration=iteration)
    return Trace(header, tuple(phases), tuple(events))


def test_passes_tell_size_order_and_where_blocks_end():
    passes = layer_passes(trace_of(4))
    first = passes[0]
    assert (first.layer, first.direction, first.micro_batch) == (1, FORWARD, 0)
    assert [(r.size, r.what, r.end) for r in first.requests] == [
        (1000, "keep", "forward +1"),
        (64, "use", "here 2"),
    ]
    assert next(p for p in passes if p.layer == 4).requests[0].end == "backward +0"


def test_layers_alike_are_one_kind_and_the_last_ones_another():
    kinds = layer_kinds(trace_of(12, micro_batches=3))
    assert [(k.name, len(k.layers)) for k in kinds] == [("A", 10), ("B", 2)]
    assert describe(kinds) == "10 layers of kind A, 2 of kind B"


def test_a_layer_in_the_middle_that_differs_is_named_with_its_request():
    with pytest.raises(PeriodicityError) as caught:
        layer_kinds(trace_of(12, change={(0, 6): 72}))
    assert "layer 6 forward of micro-batch 0" in str(caught.value)
    assert "72 bytes by use" in str(caught.value)


def test_a_micro_batch_in_the_middle_that_differs_is_named():
    with pytest.raises(PeriodicityError, match="of micro-batch 3"):
        layer_kinds(trace_of(5, micro_batches=6, change={(3, 1): 72}))


def test_where_ddp_looks_at_a_full_bucket_of_gradients_is_no_difference_of_layers():
    assert layer_kinds(trace_of(12, full={4: True, 7: False})) == layer_kinds(trace_of(12))


def test_a_resident_layer_may_differ():
    changed = trace_of(9, change={(0, 5): 72})
    with pytest.raises(PeriodicityError):
        layer_kinds(changed)
    assert [k.layers for k in layer_kinds(changed, resident=[5]) if len(k.layers) == 1] == [(5,)]


def test_iterations_that_ask_for_the_same_pass():
    check_same(trace_of(4), trace_of(4, iteration=3))


def test_iterations_that_differ_are_told_with_the_event():
    with pytest.raises(PeriodicityError, match="iterations 2 and 3 differ at event 2: 64 bytes"):
        check_same(trace_of(4), trace_of(4, iteration=3, change={(0, 1): 8}))


def test_an_iteration_with_more_events_is_told():
    with pytest.raises(PeriodicityError, match="events"):
        check_same(trace_of(4), trace_of(4, micro_batches=2, iteration=3))
