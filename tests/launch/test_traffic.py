"""What a run tells about its swapping, and the run that swaps nothing."""

from types import MappingProxyType

import pytest
import torch

from megatron_memo.training.traffic import NothingSwapped, Traffic


class Engine:
    """Counters that a step moves on."""

    def __init__(self, **step):
        self.totals = dict.fromkeys(
            (
                "d2h_bytes",
                "h2d_bytes",
                "exposed_d2h_s",
                "exposed_h2d_s",
                "d2h_busy_s",
                "h2d_busy_s",
            ),
            0.0,
        )
        self.now = 0.0
        self._step = {"seconds": 1.0, **step}

    def stats(self):
        return {**self.totals, "host_bytes": 1000.0}

    def run(self):
        for name in self.totals:
            self.totals[name] += self._step.get(name, 0.0)
        self.now += self._step["seconds"]
        return "result"


class Told:
    def __init__(self):
        self.lines, self.scalars, self.timed = [], {}, []

    def write(self, iteration, scalars):
        self.scalars[iteration] = scalars

    def time(self, seconds, steps):
        self.timed.append((seconds, steps))


def traffic(
    engine, told, *, gather=lambda answer: [answer], interval=2, foreseen=MappingProxyType({})
):
    return Traffic(
        engine.stats,
        clock=lambda: engine.now,
        gather=gather,
        log=told.lines.append,
        write=told.write,
        time=told.time,
        foresee=lambda _: foreseen,
        interval=interval,
    )


MOVES = dict(d2h_bytes=600.0, h2d_bytes=500.0, d2h_busy_s=0.5, h2d_busy_s=0.25, exposed_h2d_s=0.01)


def test_each_interval_is_told_per_iteration():
    engine, told = Engine(**MOVES), Told()
    watch = traffic(engine, told)
    for iteration in range(1, 5):
        assert watch.step(iteration, engine.run) == "result"
    assert list(told.scalars) == [2, 4]
    assert told.scalars[4] == pytest.approx(
        {
            "host bytes": 1000,
            "D2H bytes": 600,
            "D2H bytes per second": 1200,
            "exposed D2H seconds": 0,
            "H2D bytes": 500,
            "H2D bytes per second": 2000,
            "exposed H2D seconds": 0.01,
        }
    )
    seconds, steps = told.timed[1]
    assert steps == 2
    assert told.timed[0][1] == 1  # without the first step
    assert seconds == pytest.approx({"memo-exposed-d2h": 0, "memo-exposed-h2d": 0.02})


def test_a_line_is_said_once_while_little_is_waited_and_again_with_advice_when_it_is_much():
    engine, told = Engine(**MOVES), Told()
    watch = traffic(engine, told, interval=1)
    for iteration in (1, 2, 3):
        watch.step(iteration, engine.run)
    (line,) = told.lines
    assert "600 B D2H an iteration at 1.172 KiB/s" in line
    assert "compute waited 1.0% of the time" in line
    assert "--memo-prefetch-depth" not in line
    engine._step["exposed_d2h_s"] = 0.09
    watch.step(4, engine.run)
    watch.step(5, engine.run)
    assert len(told.lines) == 2
    assert "compute waited 10.0% of the time. A lower --memo-swap-ratio" in told.lines[1]


def test_a_device_that_cannot_tell_waiting_is_not_said_to_have_waited_nothing():
    engine, told = Engine(**MOVES), Told()
    for name in ("exposed_d2h_s", "exposed_h2d_s"):
        engine.totals[name] = None
    engine.run = lambda: engine.totals.update(d2h_bytes=engine.totals["d2h_bytes"] + 1)
    watch = traffic(engine, told, interval=1)
    watch.step(1, engine.run)
    watch.step(2, engine.run)
    assert "does not tell how long compute waited" in told.lines[0]
    assert "exposed D2H seconds" not in told.scalars[2]
    assert told.timed == [({}, 1)]


def test_the_rank_that_waits_most_speaks_for_all():
    engine, told = Engine(**MOVES), Told()

    def gather(answer):
        if isinstance(answer, tuple):
            return [answer, answer]  # of the first step
        other = type(answer)(
            answer.steps, answer.seconds, {**answer.sums, "exposed_d2h_s": 0.5}, 2000.0
        )
        return [answer, other]

    watch = traffic(engine, told, gather=gather, interval=1)
    watch.step(1, engine.run)
    watch.step(2, engine.run)
    assert told.scalars[2]["exposed D2H seconds"] == 0.5
    assert told.scalars[2]["host bytes"] == 2000
    assert "compute waited 51.0% of the time" in told.lines[0]


class Layer(torch.nn.Module):
    """What `begin` sees of a layer that is not memo's."""

    layer_number = 1
    self_attention = None


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([(0, 0, 0, 2)], "none of the model's 2 layers is memo's"),
        ([(0, 0, 4, 0)], "among the last ones, which stay on the device"),
        ([(9, 2, 2, 0), (0, 2, 4, 0)], "rank 1 has 2 layers that swap.*without gradients"),
    ],
)
def test_a_first_step_that_swaps_nothing_ends_the_run_and_says_why(answers, why):
    engine, told = Engine(), Told()
    watch = traffic(engine, told, gather=lambda _: answers)
    watch.begin([torch.nn.Sequential(Layer(), Layer())])
    with pytest.raises(NothingSwapped, match=why):
        watch.step(1, engine.run)


def test_a_last_stage_of_resident_layers_may_swap_nothing():
    engine, told = Engine(), Told()
    answers = [[(9, 2, 2, 0), (0, 0, 2, 0)], [({}, {}), ({}, {})]]
    traffic(engine, told, gather=lambda _: answers.pop(0)).step(1, engine.run)
    assert told.lines == []


def test_layers_that_are_not_memos_are_counted():
    engine, told, said = Engine(), Told(), []
    watch = traffic(engine, told, gather=lambda answer: said.append(answer) or [answer])
    watch.begin([torch.nn.Sequential(Layer(), Layer())])
    with pytest.raises(NothingSwapped):
        watch.step(1, engine.run)
    assert said == [(0, 0, 0, 2)]


def test_the_first_step_is_held_against_the_bill_that_the_run_started_on():
    engine, told = Engine(**MOVES), Told()

    def gather(answer):
        guess, *_ = answer
        if not isinstance(guess, dict):
            return [answer]
        return [answer, ({"swapped in an iteration": 500}, {"swapped in an iteration": 700})]

    foreseen = {"swapped in an iteration": 600, "host memory": 1000}
    watch = traffic(engine, told, gather=gather, foreseen=foreseen)
    watch.step(1, engine.run)
    title, _, swapped, host = told.lines[0].split("\n")
    assert title == "after the first iteration, on the rank that has most:"
    assert swapped.startswith("swapped in an iteration")
    assert host.startswith("host memory")
    assert swapped.endswith("600 B      700 B (off)")
    assert host.endswith("1000 B     1000 B")
