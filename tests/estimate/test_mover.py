"""The simulated engine does what the real one does: the same copies and waits, in the same order.

The real one runs on tensors without data, with a backend that writes down what it is asked for.
"""

import pytest
import torch

from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.mover import Mover
from megatron_memo.estimate.strategies import Group, LayerPlan, PaperMemo
from megatron_memo.phases import Phase
from megatron_memo.swap.engine import SwapEngine
from tests.estimate.writing import ORDERS, WritingBackend, WritingClock, in_runs

UNIT = 256  # bytes, a multiple of the engine's alignment
GROUPS = 3  # of a layer


def size(micro_batch, layer, group):
    """Bytes by which a log tells what was moved."""
    return UNIT * (1 + group + GROUPS * (layer + 10 * micro_batch))


def real(order, layers, swapping):
    backend = WritingBackend()
    engine = SwapEngine(backend)
    meta, passes, handles = torch.device("meta"), {}, {}
    for what in order:
        micro_batch = int(what[1:])
        if what[0] == "f":
            for layer in range(layers):
                one = engine.begin_layer(first=layer == 0, swaps=layer in swapping, device=meta)
                passes[micro_batch, layer] = one
                for group in range(GROUPS if one.own is not None else 0):
                    nbytes = size(micro_batch, layer, group)
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device=meta)
                    handles[micro_batch, layer, group] = one.own.put(tensor)
                    one.own.flush()
            continue
        for layer in reversed(range(layers)):
            one = passes.pop((micro_batch, layer))
            one.begin_backward()
            for group in range(GROUPS if one.own is not None else 0):
                one.own.get(handles.pop((micro_batch, layer, group)))
            one.end_backward()
    return backend.log


def simulated(order, layers, swapping, costs):
    clock = WritingClock()
    mover = Mover(clock, costs, PaperMemo(), limited=False)
    phase = Phase("layer")
    for what in order:
        micro_batch = int(what[1:])
        for layer in range(layers) if what[0] == "f" else reversed(range(layers)):
            key = (0, micro_batch, layer)
            sizes = [size(micro_batch, layer, k) for k in range(GROUPS)]
            groups = [Group(k, k, 0, nbytes, str(k)) for k, nbytes in enumerate(sizes)]
            plan = LayerPlan(groups=tuple(groups) if layer in swapping else ())
            if what[0] == "f":
                mover.begin_layer(key, plan, phase, first=layer == 0)
                for step in range(plan.steps):
                    mover.end_step(key, step, phase)
                continue
            mover.begin_backward(key, phase)
            mover.read_all(key, phase)
            mover.end_backward(key)
    assert mover.host == 0
    return clock.log


# Only a stage that has one micro-batch in flight has resident layers, the last one.
@pytest.mark.parametrize(
    ("order", "resident"), [("one", 0), ("one", 1), ("one", 2), ("several in flight", 0)]
)
def test_copies_and_waits_are_those_of_the_engine(seven_b, order, resident):
    layers = 5
    swapping = set(range(layers - resident))
    costs = Costs(seven_b, Machine(gpu("a800")))
    expected = real(ORDERS[order], layers, swapping)
    assert len([e for e in expected if e[0] == "wait"]) > 10
    assert in_runs(simulated(ORDERS[order], layers, swapping, costs)) == in_runs(expected)
