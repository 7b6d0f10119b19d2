"""Which plans a rank takes: its own, for these settings, and whole."""

import dataclasses
from argparse import Namespace

import pytest

from megatron_memo.arguments import plan_settings_from_args
from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.plan_file import PlanError, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.training.plan_source import given_plan, saved_path, saved_plan
from megatron_memo.training.planned import Identity

SETTINGS = {"seq length": 128, "tensor model parallel size": 2}
IDENTITY = Identity("cpu", 1, 2, SETTINGS)


@pytest.fixture(scope="module")
def plan():
    """Of ranks 0 and 1 of two."""
    trace = training(Shape(2))
    header = dataclasses.replace(
        trace.header, device="cpu", world_size=2, same_ranks=(0, 1), fingerprint=SETTINGS
    )
    search = Search(time_limit=10, workers=1, use_cp_sat=False)
    return make_plan([Source("t", "", dataclasses.replace(trace, header=header))], search).plan


@pytest.fixture
def file(plan, tmp_path):
    path = tmp_path / "rank-0.plan.jsonl"
    write_plan(path, plan)
    return path


def test_a_rank_takes_the_plan_of_a_rank_like_it_by_file_or_folder(file, plan):
    assert given_plan(file, IDENTITY) == plan
    assert given_plan(file.parent, IDENTITY) == plan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(rank=0, world_size=1), "it is for 2 ranks, here are 1"),
        (dict(rank=2, world_size=2), "it is for rank 0, 1, this is rank 2"),
        (dict(device="cuda"), "for the device cpu, here is cuda .*profile --device cuda"),
        (
            dict(fingerprint={**SETTINGS, "tensor model parallel size": 4}),
            "tensor model parallel size is 2 there and 4 here",
        ),
    ],
)
def test_a_plan_of_something_else_is_refused_by_what_differs(file, change, says):
    with pytest.raises(PlanError, match=says):
        given_plan(file, dataclasses.replace(IDENTITY, **change))


def test_a_damaged_plan_is_refused_by_the_flags_name(file):
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(PlanError, match=r"^--memo-plan .*cut off"):
        given_plan(file, IDENTITY)


def test_a_folder_without_this_ranks_plan_is_refused(file, tmp_path):
    with pytest.raises(PlanError, match="none of its 1 plans is for rank 5"):
        given_plan(file.parent, dataclasses.replace(IDENTITY, rank=5))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PlanError, match="holds no plan"):
        given_plan(empty, IDENTITY)


def test_a_saved_plan_of_other_settings_is_not_used_and_the_reason_told(plan, tmp_path):
    path = saved_path(tmp_path, IDENTITY)
    path.parent.mkdir()
    write_plan(path, plan)
    assert saved_plan(tmp_path, IDENTITY) == (plan, "")
    other = dataclasses.replace(IDENTITY, fingerprint={**SETTINGS, "seq length": 256})
    found, why_not = saved_plan(tmp_path, other)
    assert found is None and "seq length is 128 there and 256 here" in why_not
    assert saved_plan(tmp_path / "new", IDENTITY) == (None, "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(memo_plan="/nowhere/at/all"), "--memo-plan /nowhere/at/all: there is no such file"),
        (dict(memo_device_budget="much"), "--memo-device-budget much: must be a size such as"),
        (dict(memo_device_budget="0"), "--memo-device-budget 0: must be at least one byte"),
    ],
)
def test_flags_that_cannot_be_are_named(flags, says):
    with pytest.raises(ValueError, match=says):
        plan_settings_from_args(Namespace(**flags))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GiB", 80 << 30), ("512 MiB", 512 << 20), ("2TB", 2 * 10**12), ("1.5g", 1_500_000_000)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    settings = plan_settings_from_args(Namespace(memo_device_budget=text))
    assert settings.budget == nbytes
