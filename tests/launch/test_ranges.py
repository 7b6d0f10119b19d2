"""NVTX ranges: which iterations have them, and that they follow the phases."""

from argparse import Namespace

import pytest

from megatron_memo import phases
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.training.ranges import Ranges, nvtx_ranges

FIRST, SECOND = Phase(LAYER, FORWARD, 0, 7, 2), Phase(LAYER, BACKWARD, 0, 7)


class Recorded(Ranges):
    def __init__(self, wanted):
        self.seen = []
        super().__init__(wanted, self._begins, lambda name: self.seen.append(("end", name)))

    def _begins(self, name):
        self.seen.append(("begin", name))
        return name


def step():
    phases.enter(FIRST)
    phases.enter(SECOND)
    return "result"


def test_a_profiled_iteration_has_one_range_a_phase():
    ranges = Recorded(range(3, 5))
    assert [ranges.step(iteration, step) for iteration in range(1, 7)] == ["result"] * 6
    one = [
        ("begin", "memo: layer 7 chunk 2 forward of micro-batch 0"),
        ("end", "memo: layer 7 chunk 2 forward of micro-batch 0"),
        ("begin", "memo: layer 7 backward of micro-batch 0"),
        ("end", "memo: layer 7 backward of micro-batch 0"),
    ]
    assert ranges.seen == 2 * one


def test_a_step_that_fails_leaves_no_range_open():
    ranges = Recorded(range(1, 2))

    def fails():
        step()
        raise KeyError

    with pytest.raises(KeyError):
        ranges.step(1, fails)
    assert ranges.seen[-1] == ("end", f"memo: {SECOND}")


def asked(**changed):
    given = dict(
        profile=True, nvtx_ranges=True, profile_ranks=[0, 3], rank=3, profile_step_start=10,
        profile_step_end=12,
    )  # fmt: skip
    return Namespace(**{**given, **changed})


def test_the_iterations_are_those_that_megatron_profiles():
    ranges = nvtx_ranges(asked())
    assert list(ranges._wanted) == [11, 12]


@pytest.mark.parametrize("changed", [{"profile": False}, {"nvtx_ranges": False}, {"rank": 1}])
def test_nobody_else_is_annotated(changed):
    assert nvtx_ranges(asked(**changed)) is None


def test_without_a_list_all_ranks_are_profiled():
    assert nvtx_ranges(asked(profile_ranks=[], rank=1)) is not None
