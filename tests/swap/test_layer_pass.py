"""Steps of layers: what leaves when, what comes back when, and what is let go when."""

import gc
import weakref

import pytest
import torch

from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine
from megatron_memo.swap.group import Place, Reads

CPU = torch.device("cpu")
SOURCE, HOST, BUFFER = Place.SOURCE, Place.HOST, Place.BUFFER


@pytest.fixture
def engine():
    return SwapEngine(HostThreadBackend(), poison=True)


class Layer:
    """A forward of `steps` steps, each of which puts a tensor unless it is of `silent`."""

    def __init__(self, engine, steps, depth, *, first=False, swaps=True, silent=(), reads=None):
        self.passing = engine.begin_layer(first=first, swaps=swaps, device=CPU, depth=depth)
        self.own = self.passing.own
        self.handles, self.values = {}, {}
        for step in range(steps):
            if swaps and step not in silent:
                values = torch.randn(100)
                self.values[step] = values.clone()
                self.handles[step] = self.own.put(values)
                self.own.flush((reads or {}).get(step))
            self.passing.end_step()

    def places(self):
        return [group.place for group in self.own.groups()]

    def right(self, step):
        return torch.equal(self.own.get(self.handles[step]), self.values[step])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_is_given_up_when_so_many_more_have_ended(engine, depth):
    layer = Layer(engine, 5, depth, first=True)
    assert layer.places() == [HOST] * (5 - depth) + [SOURCE] * depth
    Layer(engine, 1, depth)
    assert layer.places() == [HOST] * (6 - depth) + [SOURCE] * (depth - 1)


def test_steps_that_put_nothing_count(engine):
    layer = Layer(engine, 5, 2, first=True, silent=(3, 4))
    assert layer.places() == [HOST] * 3


def test_steps_of_layers_that_keep_count(engine):
    layer = Layer(engine, 3, 2, first=True)
    Layer(engine, 2, 2, swaps=False)
    assert layer.places() == [HOST] * 3


@pytest.mark.parametrize("depth", [1, 2])
def test_backward_has_so_many_further_steps_on_their_way_and_lets_go_of_past_ones(engine, depth):
    layer = Layer(engine, 6, depth, first=True)
    layer.own.retire()
    passing = layer.passing
    passing.begin_backward()
    assert layer.places() == [HOST] * (5 - depth) + [BUFFER] * (1 + depth)
    for step in (5, 4, 3):
        passing.begin_backward_step(step)
        assert layer.right(step)
        coming = min(step, depth)
        past = 5 - step
        expected = [HOST] * (step - coming) + [BUFFER] * (1 + coming) + [HOST] * past
        assert layer.places() == expected


def test_what_comes_back_reaches_into_the_layers_below(engine):
    below = Layer(engine, 3, 4, first=True)
    keeps = Layer(engine, 2, 4, swaps=False)
    top = Layer(engine, 2, 4)
    for layer in (below, top):
        layer.own.retire()
    top.passing.begin_backward()  # 2 of its own, 2 of the layer that keeps, 1 of the lowest
    assert top.places() == [BUFFER] * 2
    assert below.places() == [HOST, HOST, BUFFER]
    for one in (top, keeps):
        for step in (1, 0):
            one.passing.begin_backward_step(step)
    assert below.places() == [BUFFER] * 3


def test_in_layers_all_of_a_layer_and_of_the_next_one_that_swaps_come_back(engine):
    lowest, below = Layer(engine, 3, None, first=True), Layer(engine, 3, None)
    keeps, top = Layer(engine, 2, None, swaps=False), Layer(engine, 2, None)
    for layer in (lowest, below, top):
        layer.own.retire()
    top.passing.begin_backward()
    assert top.places() == [BUFFER] * 2 and below.places() == [BUFFER] * 3
    assert lowest.places() == [HOST] * 3
    top.passing.begin_backward_step(0)
    assert top.places() == [BUFFER, HOST]  # past steps are let go all the same
    assert keeps.own is None


def test_what_several_steps_read_comes_first_and_leaves_last(engine):
    layer = Layer(engine, 5, 1, first=True, reads={0: Reads(4, 1), 2: Reads(4, 2)})
    layer.own.retire()
    passing = layer.passing
    passing.begin_backward()
    assert layer.places() == [BUFFER, HOST, BUFFER, BUFFER, BUFFER]
    passing.begin_backward_step(2)
    assert layer.places() == [BUFFER, BUFFER, BUFFER, HOST, HOST]
    passing.begin_backward_step(1)
    assert layer.places() == [BUFFER, BUFFER, HOST, HOST, HOST]
    passing.begin_backward_step(0)
    assert layer.places() == [HOST] * 5


def test_the_order_of_copies_is_that_in_which_backward_reads(engine):
    order = []
    start = engine.start_h2d
    engine.start_h2d = lambda copies, ready: order.append(copies[0].host) or start(copies, ready)
    layer = Layer(engine, 4, 3, first=True, reads={0: Reads(3, 0)})
    layer.own.retire()
    layer.passing.begin_backward()
    groups = layer.own.groups()
    assert [next(i for i, g in enumerate(groups) if g.host is h) for h in order] == [0, 3, 2, 1]


def test_what_is_asked_for_after_it_was_let_go_comes_once_more(engine):
    layer = Layer(engine, 4, 1, first=True)
    layer.own.retire()
    layer.passing.begin_backward()
    layer.passing.begin_backward_step(3)
    assert layer.right(3)
    layer.passing.begin_backward_step(1)
    assert layer.places()[3] is HOST
    moved = engine.stats()["h2d_bytes"]
    assert layer.right(3)
    assert engine.stats()["h2d_bytes"] == moved + 400


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (3, 1, 2, 0), (1, 1, 3, 0, 2)])
def test_an_odd_order_of_steps_is_slower_and_never_wrong(engine, order):
    for retired in (True, False):
        layer = Layer(engine, 4, 1, first=True)
        if retired:
            layer.own.retire()
        layer.passing.begin_backward()
        for step in order:
            layer.passing.begin_backward_step(step)
            assert all(layer.right(other) for other in (step, 3, 0))
        layer.passing.end_backward()


def test_at_the_turn_a_past_step_gives_up_its_sources_after_their_copy(engine):
    layer = Layer(engine, 3, 3, first=True)
    assert layer.places() == [SOURCE] * 3
    waited = []
    engine.retire_after_d2h = waited.append
    layer.passing.begin_backward()
    layer.passing.begin_backward_step(2)
    assert layer.right(2) and not waited
    layer.passing.begin_backward_step(1)
    assert layer.places() == [SOURCE, SOURCE, HOST]
    assert waited == [layer.own.groups()[2].d2h]
    assert engine.stats()["h2d_bytes"] == 0


def test_a_past_step_that_nobody_read_is_waited_for_before_its_memory_is_given_up(engine):
    layer = Layer(engine, 3, 1, first=True)
    layer.own.retire()
    waited = []
    engine.free_after_h2d = waited.append
    layer.passing.begin_backward()
    event = layer.own.groups()[2].h2d
    layer.passing.begin_backward_step(2)
    layer.passing.begin_backward_step(1)
    assert waited == [event]


def test_steps_of_another_micro_batch_are_retired_one_by_one_as_one_goes_backward(engine):
    older, newer = Layer(engine, 4, 3, first=True), Layer(engine, 4, 3, first=True)
    assert older.places() == [HOST] * 4
    assert newer.places() == [HOST] + [SOURCE] * 3
    older.passing.begin_backward()
    assert newer.places() == [HOST] + [SOURCE] * 3
    for step in (3, 2):
        older.passing.begin_backward_step(step)
        older.passing.begin_backward_step(step)  # told by each of q, k and v
        assert older.right(step)
    assert newer.places() == [HOST] * 3 + [SOURCE]
    older.passing.end_backward()
    assert newer.places() == [HOST] * 3 + [SOURCE]


def test_a_pass_leaves_nothing_in_flight_behind_it(engine):
    for depth in (None, 1, 3, 50):
        below, top = Layer(engine, 3, depth, first=True), Layer(engine, 3, depth)
        for layer in (top, below):
            layer.passing.begin_backward()
            for step in (2, 1, 0):
                layer.passing.begin_backward_step(step)
                assert layer.right(step)
            layer.passing.end_backward()
        assert not engine._in_flight
        assert not engine._abandoned


def test_layers_that_are_dropped_without_backward_do_not_keep_each_other(engine):
    below, top = Layer(engine, 3, 1, first=True), Layer(engine, 3, 1)
    assert top.passing.below is below.passing
    seen = [weakref.ref(below.passing), weakref.ref(top.passing)]
    of_two = engine.host.taken
    del below, top
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    for _ in range(5):
        Layer(engine, 3, 1, first=True)
        assert engine.host.taken <= of_two  # each is released by the second one after it
