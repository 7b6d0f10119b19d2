"""The life of a planned run, step by step, with a stand-in for the allocator."""

from types import SimpleNamespace

import pytest

from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.plan.plan_file import PlanError
from megatron_memo.training import planned
from megatron_memo.training.planned import Identity, PlannedSteps, Start

STATS = dict(requests=10, hits=10, native_entries=0, miss_unknown=0, miss_occupied=0)
STATS |= dict(native_mallocs=0, arena_peak=1)


class Allocator:
    """Notes what it is told; `stats` are as if all had gone well."""

    alignment = 64

    def __init__(self):
        self.mode, self.loaded, self.inside = "off", None, False

    def start_recording(self):
        self.mode = "record"

    def stop_recording(self):
        assert self.mode == "record"
        self.mode = "off"
        return "raw"

    def load_plan(self, entries, arena):
        if arena < 0:
            raise AllocatorError("no memory for the arena")
        self.loaded = arena

    def replay(self):
        self.mode = "replay"

    def off(self):
        self.mode = "off"

    def begin_iteration(self):
        self.inside = True

    def end_iteration(self):
        self.inside = False

    def enter(self, number):
        pass

    def name_phases(self, names):
        pass

    def reset_stats(self):
        pass

    def stats(self):
        return SimpleNamespace(**STATS)


@pytest.fixture
def run(monkeypatch):
    """``run(plan, others=..., ...)``: steps of a rank whose recorded steps give that plan."""
    monkeypatch.setattr(planned, "asdict", vars)
    monkeypatch.setattr(planned, "to_trace", lambda raw, names, header: header.iteration)
    monkeypatch.setattr(planned.markers, "mark_model", lambda chunks: lambda: None)

    def build(made, *, others=(None,), ready=None, budget=None):
        def make_plan(sources, search):
            if isinstance(made, Exception):
                raise made
            return SimpleNamespace(plan=made)

        monkeypatch.setattr(planned, "make_plan", make_plan)
        said, allocator, begun = [], Allocator(), None
        identity = Identity("cpu", 0, 2, {})
        steps = PlannedSteps(
            allocator,
            lambda chunks: Start(identity, ready),
            budget=budget,
            gather=lambda answer: [answer, *((begun and other, answer[1]) for other in others)],
            log=said.append,
            write=lambda iteration, scalars: None,
            interval=1,
        )
        steps.begin([])  # the others have nothing against it
        begun = True
        return SimpleNamespace(steps=steps, allocator=allocator, said=said, modes=[])

    return build


def go(run, count, first=1):
    """Runs steps and notes the mode in which each was."""
    for iteration in range(first, first + count):
        run.steps.step(iteration, lambda: run.modes.append(run.allocator.mode))
    return run.modes


def a_plan(arena=1000):
    window = SimpleNamespace(phases=(), entries=())
    return SimpleNamespace(arena=arena, gap=0, bound=arena, windows=(window,))


def test_the_third_step_is_recorded_and_the_fifth_replays(run):
    one = run(a_plan())
    assert go(one, 6) == ["off", "off", "record", "off", "replay", "replay"]
    assert one.allocator.loaded == 1000 and not one.allocator.inside
    assert one.said == ["memory plan in use from here on: arena of 1000 B, proven to be the least"]


def test_a_plan_that_is_there_replays_from_the_second_step_on(run):
    assert go(run(None, ready=a_plan()), 3) == ["off", "replay", "replay"]


def test_a_recorded_step_that_breaks_off_is_followed_by_another_recorded_one(run):
    one = run(a_plan())
    go(one, 2)

    def break_off():
        raise RuntimeError("a rerun is asked for")

    with pytest.raises(RuntimeError, match="rerun"):
        one.steps.step(3, break_off)
    assert not one.allocator.inside
    assert go(one, 3, first=3)[2:] == ["record", "replay", "replay"]


@pytest.mark.parametrize(
    ("made", "others", "budget", "says"),
    [
        (PlanError("nothing to plan"), (None,), None, "rank 0: nothing to plan"),
        (a_plan(), ("no memory",), None, "rank 1: no memory"),
        (a_plan(-1), (None,), None, "rank 0: no memory for the arena"),
        (a_plan(1000), (None,), 999, "--memo-device-budget 999: the plan's arena needs 1000"),
    ],
)
def test_where_one_rank_has_no_plan_none_replays_and_training_goes_on(
    run, made, others, budget, says
):
    one = run(made, others=others, budget=budget)
    assert go(one, 8) == ["off", "off", "record"] + ["off"] * 5
    assert len(one.said) == 1 and says in one.said[0]
    assert one.steps.report()["replayed"] is False


def test_a_refusal_of_one_rank_ends_all_before_the_first_step(run, monkeypatch):
    one = run(a_plan())

    def refuse(chunks):
        raise PlanError("the plan is of another model")

    monkeypatch.setattr(one.steps, "_starting", refuse)
    with pytest.raises(PlanError, match="rank 0: the plan is of another model"):
        one.steps.begin([])
