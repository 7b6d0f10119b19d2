"""The simulated engine against the real one where layers work in steps (`--memo-prefetch-depth`).

Logs as in test_mover; groups, and who reads them, are those of `strategies.Memo`.
"""

from dataclasses import replace

import pytest
import torch

from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.mover import Mover
from megatron_memo.estimate.strategies import LayerPlan, Memo
from megatron_memo.phases import Phase
from megatron_memo.swap.engine import SwapEngine
from megatron_memo.swap.group import Reads
from tests.estimate.writing import ORDERS, WritingBackend, WritingClock, in_runs

LAYERS = 5
UNIT = 256  # bytes, a multiple of the engine's alignment
META = torch.device("meta")


def plans_of(base, resident):
    """By micro-batch and layer; sizes tell layers, micro-batches and groups apart."""
    plans = {}
    for micro_batch in range(3):
        for layer in range(LAYERS):
            groups = [
                replace(group, nbytes=UNIT * (1 + k + 20 * (layer + 10 * micro_batch)))
                for k, group in enumerate(base.groups)
            ]
            own = tuple(groups) if layer < LAYERS - resident else ()
            plans[micro_batch, layer] = LayerPlan(base.shares, own)
    return plans


def walk(order):
    """(direction, micro-batch, layer) of each layer pass."""
    for what in order:
        layers = range(LAYERS) if what[0] == "f" else reversed(range(LAYERS))
        yield from ((what[0], int(what[1:]), layer) for layer in layers)


def real(order, plans, depth):
    backend = WritingBackend()
    engine, passes, handles = SwapEngine(backend), {}, {}
    for direction, *key in walk(order):
        plan = plans[tuple(key)]
        if direction == "f":
            one = passes[tuple(key)] = engine.begin_layer(
                first=key[1] == 0, swaps=bool(plan.groups), device=META, depth=depth
            )
            for step in range(-1, plan.steps):
                for group in plan.groups:
                    if group.step == step:
                        tensor = torch.empty(group.nbytes, dtype=torch.uint8, device=META)
                        handles[group.nbytes] = one.own.put(tensor)
                        one.own.flush(Reads(group.first, group.last))
                if step >= 0:
                    one.end_step()
            continue
        one = passes.pop(tuple(key))
        one.begin_backward()
        for step in reversed(range(plan.steps)):
            one.begin_backward_step(step)
            for group in plan.groups:
                if group.last <= step <= group.first:
                    one.own.get(handles[group.nbytes])
        one.end_backward()
    return backend.log


def simulated(order, plans, depth, costs):
    clock = WritingClock()
    engine = Mover(clock, costs, Memo(1.0, depth=depth), limited=False)
    phase = Phase("layer")
    for direction, *key in walk(order):
        plan, place = plans[tuple(key)], (0, *key)
        if direction == "f":
            engine.begin_layer(place, plan, phase, first=key[1] == 0)
            for step in range(plan.steps):
                engine.end_step(place, step, phase)
            continue
        engine.begin_backward(place, phase)
        for step in reversed(range(plan.steps)):
            engine.begin_backward_step(place, step, phase)
        engine.end_backward(place)
    assert engine.host == 0
    return clock.log


def once(log):
    """A wait for what compute has waited for already changes nothing."""
    return list(dict.fromkeys(log))


@pytest.mark.parametrize("depth", [None, 1, 2, 4, 9, 30])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("order", "resident"), [("one", 0), ("one", 2), ("several in flight", 0)])
def test_steps_leave_and_come_back_as_in_the_engine(seven_b, depth, ratio, chunks, order, resident):
    costs = Costs(seven_b, Machine(gpu("a800")))
    plans = plans_of(Memo(ratio, chunks=chunks, resident=0).plan(costs, 1), resident)
    expected = real(ORDERS[order], plans, depth)
    found = simulated(ORDERS[order], plans, depth, costs)
    assert in_runs(once(found)) == in_runs(once(expected))
