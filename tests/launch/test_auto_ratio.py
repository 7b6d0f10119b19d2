"""`--memo-swap-ratio auto`: what is measured, how it is chosen and agreed, what is kept."""

import argparse
import dataclasses
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from torch import nn

from megatron_memo import phases
from megatron_memo.arguments import add_memo_arguments, memo_config_from_args, ratio_is_auto
from megatron_memo.config import PROVISIONAL_RATIO, MemoConfig
from megatron_memo.layer.recompute_watch import recomputing
from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.plan.ratio import Link, NoRoom, Problem, Times, solve
from megatron_memo.training import auto_ratio, auto_setup
from megatron_memo.training.auto_ratio import AutoRatio, Known, NoRatio
from megatron_memo.training.layer_times import HostClock, LayerTimes, LayerWatch
from megatron_memo.training.measurements import (
    Measured,
    Record,
    read_record,
    unsuitable,
    write_record,
)

TIMES = LayerTimes(Times(1, 2, 3), Times(2, 4, 6), 1.5, passes=4)
MEASURED = Measured(
    layers=2,
    resident=0,
    micro_batches=2,
    rows=100,
    chunks=4,
    forward=TIMES.forward,
    backward=TIMES.backward,
    recompute=1.5,
    always=1000,
    others=4000,
    link=Link(1e3, 2e3, 0.9e3, 1.8e3),
    other_seconds=0.5,
)


def parse(*words):
    return add_memo_arguments(argparse.ArgumentParser()).parse_args(words)


# ---- the flags


def test_auto_begins_with_the_ratio_that_fits_if_anything_does():
    args = parse("--memo-swap-ratio", "auto", "--memo-chunks", "4")
    assert ratio_is_auto(args)
    assert memo_config_from_args(args) == MemoConfig(swap_ratio=PROVISIONAL_RATIO, chunks=4)
    assert not ratio_is_auto(parse("--memo-swap-ratio", "0.4"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memo-swap-ratio", "automatic"], "--memo-swap-ratio automatic: must be auto, or a"),
        (
            ["--memo-swap-ratio", "0.5", "--memo-measurements", "f"],
            "--memo-measurements f: has no effect with --memo-swap-ratio 0.5",
        ),
        (["--memo-measurements", "f"], "--memo-measurements f: has no effect without"),
        (["--memo-link-bandwidth", "1GiB"], "--memo-link-bandwidth 1GiB: has no effect without"),
        (
            ["--memo-swap-ratio", "0.5", "--memo-link-bandwidth", "fast"],
            "--memo-link-bandwidth fast: must be a size",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(words, sentence):
    with pytest.raises(ValueError) as error:
        memo_config_from_args(parse(*words))
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


def test_a_slow_link_is_refused_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr("megatron_memo.platform.on_cpu", lambda: False)
    with pytest.raises(ValueError, match="only on a machine without a GPU"):
        memo_config_from_args(parse("--memo-swap-ratio", "1", "--memo-link-bandwidth", "1GiB"))


# ---- times from markers


class Clock(HostClock):
    """Seconds pass when a test says so."""

    now = 0.0

    def mark(self):
        return self.now


def test_a_layers_parts_are_timed_without_waits_and_recomputation():
    clock, waited = Clock(), [0.0]
    watch = LayerWatch(clock, lambda: waited[0])

    def go(seconds, chunk=None, direction=FORWARD, layer=1):
        phases.enter(Phase(LAYER, direction, 0, layer, chunk))
        clock.now += seconds

    with watch.listening():
        phases.begin_iteration()
        for layer in (1, 2, 3):
            # The third layer is followed by a wait for somebody: the median leaves it out.
            late = 100 if layer == 3 else 0
            for chunk, seconds in ((None, 0.5), (0, 1), (1, 1), (None, 10)):
                go(seconds, chunk, layer=layer)
            go(3, 0, layer=layer)
            waited[0] += 2  # of which compute stood still for a copy
            go(4 + late, 1, layer=layer)
        for layer in (3, 2, 1):
            go(0.25, None, BACKWARD, layer)
            go(6, 1, BACKWARD, layer)
            with recomputing():
                clock.now += 5
            clock.now += 0.75
            go(6, 0, BACKWARD, layer)
            go(20, None, BACKWARD, layer)
            go(2, 1, BACKWARD, layer)
            go(2, 0, BACKWARD, layer)
    found = watch.times()
    assert found.forward == Times(pre=2.5, attention=10, post=5)
    assert found.backward == Times(pre=4, attention=20, post=13)
    assert found.recompute == 5 and found.passes == 3


def test_experts_count_with_what_follows_attention():
    clock = Clock()
    watch = LayerWatch(clock, lambda: 0.0)

    def go(seconds, chunk=None, direction=FORWARD):
        phases.enter(Phase(LAYER, direction, 0, 1, chunk))
        clock.now += seconds

    with watch.listening():
        phases.begin_iteration()
        for chunk, seconds in ((None, 0.5), (0, 1), (None, 10), (0, 3), (None, 7)):
            go(seconds, chunk)
        for chunk, seconds in ((None, 14), (0, 6), (None, 20), (0, 2)):
            go(seconds, chunk, BACKWARD)
    found = watch.times()
    assert found.forward == Times(pre=1.5, attention=10, post=10)
    assert found.backward == Times(pre=2, attention=20, post=20)


def test_a_step_without_layers_has_no_times():
    watch = LayerWatch(Clock(), lambda: 0.0)
    with watch.listening():
        pass
    with pytest.raises(ValueError, match="no layer"):
        watch.times()


# ---- the life of a run


class Layer(MemoTransformerLayer):
    """Nothing but what is asked of a layer."""

    def __init__(self, number, resident=0):
        nn.Module.__init__(self)
        self.memo = MemoConfig(PROVISIONAL_RATIO, chunks=4, resident_layers=resident)
        self.layer_number = number
        self.is_mtp_layer = self.further = False
        self.config = SimpleNamespace(num_layers=2, mtp_num_layers=None)
        self.rows_seen = (100, 1)


class Watch:
    def __init__(self, *steps):
        self.watched, self.steps = 0, steps or (TIMES,)

    @contextmanager
    def listening(self):
        self.watched += 1
        yield

    def times(self):
        return self.steps[min(self.watched, len(self.steps)) - 1]


class Planned:
    def __init__(self, layers):
        self.layers, self.begun, self.steps = layers, None, []

    def begin(self, chunks):
        self.begun = [layer.memo.swap_ratio for layer in self.layers]

    def step(self, iteration, run):
        self.steps.append(iteration)
        return run()


@pytest.fixture
def one(monkeypatch):
    """``one(known=..., solve=..., others=...)``: a rank's run; ``others`` answer as other ranks."""
    monkeypatch.setattr(auto_ratio, "mark_model", lambda chunks: lambda: None)

    def build(
        *,
        known=lambda: None,
        solve=None,
        others=lambda answer: [],
        fits=lambda ratio: True,
        steps=(),
    ):
        layers = [Layer(1), Layer(2)]
        run = SimpleNamespace(
            layers=layers, said=[], saved=[], moved=0, seen=[], ratios=[], released=[]
        )

        def choose(measured):
            run.seen.append(measured)
            return solve(measured)

        auto = AutoRatio(
            known=known,
            watch=Watch(*steps),
            stats=lambda: {"d2h_bytes": run.moved},
            probe=lambda: MEASURED.link,
            solve=choose,
            predict=lambda measured, ratio: 10 - ratio,
            fits=fits,
            device_room=lambda always: None,
            gather=lambda answer: [answer, *others(answer)],
            release=lambda: run.released.append(layers[0].memo.swap_ratio),
            save=lambda ranks, ratio: run.saved.append((list(ranks), ratio)),
            log=run.said.append,
        )
        planned = Planned(layers)
        inner = auto.before(planned)
        auto.begin([nn.ModuleList(layers)])

        def train():
            ratio = layers[0].memo.swap_ratio
            run.ratios.append(ratio)
            # Of two layers and two micro-batches; a layer has 1000 bytes always, 4000 others.
            run.moved += 4 * (1000 + 4000 * ratio)
            return "result"

        def step(iteration):
            return auto.step(iteration, lambda: inner(iteration, train))

        run.auto, run.planned, run.step = auto, planned, step
        return run

    return build


def chosen(ratio):
    """A rank's answer, of the real solver's kind."""
    choice = solve(problem())
    return lambda measured: dataclasses.replace(choice, ratio=ratio)


def problem(**other):
    values = dict(
        rows=100,
        chunks=4,
        forward=TIMES.forward,
        backward=TIMES.backward,
        recompute=1.5,
        always=1000,
        others=4000,
        link=Link(1e3, 2e3),
        layers=2,
        resident=0,
        host=10**6,
    )
    return Problem(**(values | other))


def test_three_iterations_measure_and_the_fourth_has_the_ratio(one):
    run = one(solve=chosen(0.4))
    assert [run.step(iteration) for iteration in range(1, 6)] == ["result"] * 5
    assert run.ratios == [0.0, 0.0, 0.25, 0.4, 0.4]
    assert all(layer.memo == MemoConfig(0.4, chunks=4, resident_layers=0) for layer in run.layers)
    assert len(run.said) == 1 and run.said[0].startswith("swap ratio 0.4 (")
    (measured,) = run.seen
    seconds = measured.other_seconds
    assert measured == dataclasses.replace(MEASURED, other_seconds=seconds)
    assert run.saved == [([measured], 0.4)]
    assert run.released == [0.4]  # host memory that was cut for other ratios


def longer(times, factor):
    forward, backward = (
        Times(part.pre * factor, part.attention * factor, part.post * factor)
        for part in (times.forward, times.backward)
    )
    return LayerTimes(forward, backward, times.recompute * 0.75, times.passes)


@pytest.mark.parametrize("busy", [0, 1])
def test_of_two_measured_steps_the_faster_counts(one, busy):
    steps = [TIMES, TIMES]
    steps[busy] = longer(TIMES, 1.5)
    run = one(solve=chosen(0.4), steps=steps)
    for iteration in range(1, 4):
        run.step(iteration)
    (measured,) = run.seen
    assert (measured.forward, measured.backward) == (TIMES.forward, TIMES.backward)
    assert measured.recompute == steps[0].recompute  # the second recomputes fewer rows
    assert measured.unsteady == pytest.approx(0.5)
    assert "a layer took 50% longer in one of the two measured steps" in run.said[0]


def test_steps_that_differ_little_are_not_worth_a_word(one):
    run = one(solve=chosen(0.4), steps=[TIMES, longer(TIMES, 1.2)])
    for iteration in range(1, 4):
        run.step(iteration)
    assert run.seen[0].unsteady == pytest.approx(0.2)
    assert "longer" not in run.said[0]


def test_a_busy_rank_is_told_of_by_the_one_that_speaks(one):
    other = dataclasses.replace(MEASURED, unsteady=0.9)
    told = auto_ratio.Told(None, dataclasses.replace(solve(problem()), ratio=0.6), other)
    run = one(
        solve=chosen(0.4),
        others=lambda answer: [told] if isinstance(answer, auto_ratio.Told) else [],
    )
    for iteration in range(1, 4):
        run.step(iteration)
    assert "a layer took 90% longer" in run.said[0]


def test_layers_are_measured_at_ratio_0_whatever_they_had(one):
    run = one(solve=chosen(0.4))
    for layer in run.layers:
        layer.memo = dataclasses.replace(layer.memo, swap_ratio=1.0)
    run.auto.begin([nn.ModuleList(run.layers)])
    run.step(1)
    assert run.ratios == [0.0]


def test_no_more_is_swapped_for_the_measurement_than_host_memory_takes(one):
    run = one(solve=chosen(0.05), fits=lambda ratio: ratio < 0.1)
    for iteration in range(1, 5):
        run.step(iteration)
    assert run.ratios == [0.0, 0.0, 0.0625, 0.05]
    # 6 of 100 rows are 0.0625 of them, to the nearest.
    assert run.seen[0].others == pytest.approx(4000, rel=0.05)
    none = one(solve=chosen(0.0), fits=lambda ratio: False)
    for iteration in range(1, 4):
        none.step(iteration)
    assert none.ratios == [0.0, 0.0, 0.0] and none.seen[0].others == 100 * 1000


def test_a_memory_plan_begins_when_the_ratio_is_fixed(one):
    run = one(solve=chosen(0.4))
    for iteration in range(1, 4):
        assert run.planned.begun is None or iteration > 3
        run.step(iteration)
    assert run.planned.begun == [0.4, 0.4] and run.planned.steps == []
    run.step(4)
    assert run.planned.steps == [4]


def test_all_ranks_take_the_smallest_ratio(one):
    def others(answer):
        if isinstance(answer, auto_ratio.Told):
            least = dataclasses.replace(answer.choice, ratio=0.125)
            return [dataclasses.replace(answer, choice=least), auto_ratio.Told()]
        return [(None, None)] * 2 if isinstance(answer, tuple) else [99.0, None]

    run = one(solve=chosen(0.4), others=others)
    for iteration in range(1, 4):
        run.step(iteration)
    assert run.auto.ratio == 0.125 and "should take 99 s" in run.said[0]


def test_a_rank_where_nothing_fits_ends_the_run_on_all(one):
    def none(measured):
        raise NoRoom("host memory 1 GiB: not enough")

    run = one(solve=none)
    run.step(1)
    run.step(2)
    with pytest.raises(NoRatio, match="rank 0: host memory 1 GiB: not enough"):
        run.step(3)


def test_what_an_earlier_run_chose_is_there_before_the_first_step(one):
    run = one(known=lambda: Known(MEASURED, 0.3, "as before"))
    assert run.auto.ratio == 0.3 and run.planned.begun == [0.3, 0.3]
    run.step(1)
    assert run.ratios == [0.3] and run.planned.steps == [1]
    assert run.saved == [([MEASURED], 0.3)]
    assert run.said == ["swap ratio 0.3, as before"]


def test_measurements_that_are_given_are_solved_anew(one):
    run = one(known=lambda: Known(MEASURED, None, "from FILE"), solve=chosen(0.6))
    assert run.auto.ratio == 0.6 and run.seen == [MEASURED] and "from FILE" in run.said[0]


def test_ranks_that_know_different_ratios_measure_together(one):
    def others(answer):
        return [(None, ("as before", 0.2))] if isinstance(answer, tuple) else [answer]

    run = one(known=lambda: Known(MEASURED, 0.3, "as before"), solve=chosen(0.4), others=others)
    assert run.auto.ratio is None
    for iteration in range(1, 4):
        run.step(iteration)
    assert run.auto.ratio == 0.4


def test_measurements_that_do_not_suit_end_the_run_before_a_step(one):
    def refuse():
        raise ValueError("--memo-measurements f: they are of another run")

    with pytest.raises(NoRatio, match="rank 0: --memo-measurements f: they are of another run"):
        one(known=refuse)


# ---- files


RECORD = Record({"hidden_size": 64, "torch": "2.14.1"}, "a machine", 0.4, (MEASURED, None))


def test_measurements_survive_their_file(tmp_path):
    path = tmp_path / "made" / "ratio.json"
    write_record(path, RECORD)
    assert read_record(path) == RECORD
    assert unsuitable(RECORD, RECORD.fingerprint, world_size=2) == []


def test_measurements_of_another_model_say_what_differs():
    here = {**RECORD.fingerprint, "hidden_size": 128}
    assert unsuitable(RECORD, here, world_size=4) == [
        "hidden size is 64 there and 128 here",
        "it is of 2 ranks, here are 4",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a file of measurements"),
        ('{"version": 99}', r"of version 1 \(it says 99\)"),
        ('{"version": 1}', "its content is not what it should be"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "ratio.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        read_record(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """``setup(**flags)``: Megatron's arguments of a tiny job; a saved record suits them."""
    monkeypatch.setattr(auto_setup, "_fingerprint", lambda args, memo: RECORD.fingerprint)
    monkeypatch.setattr(auto_setup, "machine", lambda: "a machine")
    host = SimpleNamespace(bytes=10**6)
    monkeypatch.setattr(auto_setup, "host_budget", lambda args: host)
    held = SimpleNamespace(layers=2, passes=2)
    monkeypatch.setattr(auto_setup, "most_held", lambda args, resident: held)

    def build(**flags):
        values = dict(
            memo_swap_ratio="auto",
            memo_measurements=None,
            pipeline_model_parallel_size=1,
            context_parallel_size=1,
            seq_length=4096,
            train_iters=10,
            world_size=2,
            rank=0,
            load=None,
            save=None,
        )
        return argparse.Namespace(**(values | flags))

    return build


MEMO = MemoConfig(PROVISIONAL_RATIO, chunks=4, resident_layers=0)


def saved(folder, record=RECORD):
    write_record(folder / "memo_plan" / "ratio.json", record)
    return str(folder)


def test_a_resumed_run_keeps_the_ratio_that_was_chosen(setup, tmp_path):
    args, said = setup(load=saved(tmp_path)), []
    known = auto_setup._known(args, MEMO, 10**6, said.append)
    assert known.ratio == 0.4 and known.measured == MEASURED and said == []


@pytest.mark.parametrize(
    ("change", "host", "why"),
    [
        ({"machine": "another"}, 10**6, "it is of another, here is a machine"),
        ({"fingerprint": {}}, 10**6, "hidden size is off there and 64 here"),
        ({}, 2500, "its ratio 0.4 does not fit into today's memory"),
    ],
)
def test_a_resumed_run_measures_anew_where_that_does_not_suit(setup, tmp_path, change, host, why):
    args, said = setup(load=saved(tmp_path, dataclasses.replace(RECORD, **change))), []
    assert auto_setup._known(args, MEMO, host, said.append) is None
    assert len(said) == 1 and said[0].startswith("the swap ratio is measured anew: ")
    assert why in said[0]


def test_without_a_run_a_file_of_measurements_gives_the_ratio(setup, tmp_path):
    path = str(tmp_path / "memo_plan" / "ratio.json")
    saved(tmp_path)
    assert auto_setup.ratio_without_run(setup(memo_measurements=path)) == 0.4
    with_host = setup(memo_measurements=path, memo_host_budget="1MB")
    ratio = auto_setup.ratio_without_run(with_host)
    assert ratio == solve(auto_setup.problem(setup(), MEMO, MEASURED, 10**6)).ratio
    with pytest.raises(ValueError, match="--memo-swap-ratio auto: measures a training run"):
        auto_setup.ratio_without_run(setup())


def test_a_run_that_ends_before_it_has_measured_is_refused(setup):
    with pytest.raises(ValueError, match=r"--memo-swap-ratio auto: .* --train-iters is 3"):
        auto_setup.auto_ratio(setup(train_iters=3), MEMO, print)
    assert auto_setup.auto_ratio(setup(memo_swap_ratio="0.5"), MEMO, print) is None


def test_layers_that_all_stay_on_the_device_have_no_ratio(setup):
    resident = dataclasses.replace(MEMO, resident_layers=5)
    with pytest.raises(ValueError, match="--memo-resident-layers 5: all 4 layers stay on"):
        auto_setup.auto_ratio(setup(num_layers=4), resident, print)


def test_the_file_is_plain_json(tmp_path):
    write_record(tmp_path / "ratio.json", RECORD)
    found = json.loads((tmp_path / "ratio.json").read_text())
    assert found["version"] == 1 and found["ranks"][0]["forward"]["attention"] == 2
