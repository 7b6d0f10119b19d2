"""Markers: who hears them, and how micro-batches are counted."""

import pytest

from megatron_memo import phases
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, START, Phase


@pytest.fixture
def heard():
    found = []
    with phases.listening(found.append):
        yield found


def test_a_listener_hears_each_change_of_phase_once(heard):
    first, second = Phase(LAYER, FORWARD, 0, 1), Phase(LAYER, FORWARD, 0, 2)
    for phase in (START, first, first, second, first):
        phases.enter(phase)
    assert heard == [first, second, first]


def test_without_a_listener_a_marker_does_nothing():
    phases.enter(Phase(LAYER, FORWARD, 0, 1))
    with phases.listening(lambda phase: pytest.fail("nothing was entered")):
        phases.enter(START)


def test_a_second_listener_hears_what_comes_while_it_listens(heard):
    before, meanwhile, after = (Phase(LAYER, FORWARD, 0, layer) for layer in (1, 2, 3))
    second = []
    phases.enter(before)
    with phases.listening(second.append):
        phases.enter(before)
        phases.enter(meanwhile)
    phases.enter(after)
    assert heard == [before, meanwhile, after]
    assert second == [meanwhile]


def test_an_iteration_begins_in_start_with_micro_batch_0(heard):
    phases.begin_iteration()
    assert [phases.begin_micro_batch(), phases.begin_micro_batch()] == [0, 1]
    assert phases.current_micro_batch() == 1
    phases.enter(Phase(LAYER, BACKWARD, 1, 1))
    phases.begin_iteration()
    assert heard[-1] == START
    assert phases.begin_micro_batch() == 0


def test_virtual_stages_count_their_own_micro_batches():
    phases.begin_iteration()
    order = [(stage, phases.begin_micro_batch(stage)) for stage in (0, 0, 1, 0, 1)]
    assert order == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]


def test_a_phase_reads_as_words():
    assert str(Phase(LAYER, BACKWARD, 3, 12, 5, 1)) == (
        "layer 12 chunk 5 backward of micro-batch 3 on virtual stage 1"
    )
    assert str(START) == "other"
