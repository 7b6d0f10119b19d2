"""The trace of a real iteration: which one, what is in its lanes, and that it disturbs nothing."""

import json

import pytest

from megatron_memo import phases
from megatron_memo.layer.recompute_watch import recomputing
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.swap import watch
from megatron_memo.training.run_trace import TRACED_STEP, RunTrace

FIRST, SECOND = Phase(LAYER, FORWARD, 0, 7, 2), Phase(LAYER, BACKWARD, 0, 7)


class Clock:
    """Seconds that only pass when a test says so."""

    def __init__(self):
        self.now, self.settled = 100.0, 0

    def mark(self):
        return self.now

    def seconds(self, first, second):
        return second - first

    def settle(self):
        self.settled += 1


class Bytes:
    """A copy of so many bytes, as far as a watcher asks."""

    def __init__(self, count):
        self.device = self
        self.numel = lambda: count


class Run:
    """A trace, the lines said of it, and a step that takes nine seconds."""

    def __init__(self, path, *, mark=None, ready=lambda: True):
        self.clock, self.said, self.path = Clock(), [], path
        self.trace = RunTrace(
            path, self.clock, mark=mark, ready=ready, rank=0, log=self.said.append
        )

    def step(self):
        self.clock.now += 1  # before the first marker
        phases.enter(FIRST)
        self.clock.now += 2
        start = self.clock.now
        phases.enter(SECOND)
        self.clock.now += 1
        with recomputing():
            self.clock.now += 3
        watch.tell(watch.TO_HOST, start, self.clock.now, [Bytes(1000), Bytes(24)])
        self.clock.now += 2
        return "result"

    def train(self, first, last):
        for iteration in range(first, last + 1):
            assert self.trace.step(iteration, self.step) == "result"

    def events(self):
        content = json.loads(self.path.read_text())
        return [event for event in content["traceEvents"] if event["ph"] == "X"]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "trace.json")


def test_one_iteration_is_traced_and_the_line_says_which(run):
    run.train(1, TRACED_STEP - 1)
    assert not run.path.exists() and run.clock.settled == 0
    run.train(TRACED_STEP, TRACED_STEP + 3)
    run.trace.finish()
    (line,) = run.said
    assert line.startswith(f"iteration {TRACED_STEP} of rank 0 is in {run.path}")
    assert json.loads(run.path.read_text())["otherData"]["iteration"] == TRACED_STEP


def test_a_resumed_run_counts_its_own_iterations(run):
    run.train(501, 500 + TRACED_STEP)
    assert json.loads(run.path.read_text())["otherData"]["iteration"] == 500 + TRACED_STEP


def test_a_trace_waits_for_the_ratio(tmp_path):
    known = []
    run = Run(tmp_path / "trace.json", ready=lambda: bool(known))
    run.train(1, TRACED_STEP + 2)
    assert not run.path.exists()
    known.append(1)
    run.train(TRACED_STEP + 3, TRACED_STEP + 3)
    assert run.path.exists()


def test_lanes_have_phases_what_is_computed_again_and_copies(run):
    run.train(1, TRACED_STEP)
    found = [(e["cat"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in run.events()]
    assert found == [
        ("compute", "other: other", 0.0, 1.0),
        ("compute", f"{FIRST}: forward", 1.0, 2.0),
        ("compute", f"{SECOND}: backward", 3.0, 1.0),
        ("compute", f"{SECOND}: again", 4.0, 3.0),
        ("compute", f"{SECOND}: backward", 7.0, 2.0),
        ("D2H", "copy", 3.0, 4.0),
    ]
    copy = run.events()[-1]["args"]
    assert copy == {"phase": str(SECOND), "bytes": 1024, "GB/s": 0.0}


def test_the_model_is_marked_for_the_traced_step_alone(tmp_path):
    marked = []

    def mark(chunks):
        marked.append(chunks)
        return lambda: marked.append("undone")

    run = Run(tmp_path / "trace.json", mark=mark)
    run.trace.begin(["the model"])
    run.train(1, TRACED_STEP + 1)
    assert marked == [["the model"], "undone"]


def test_a_step_that_fails_leaves_nobody_watching(run):
    run.train(1, TRACED_STEP - 1)

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        run.trace.step(TRACED_STEP, fails)
    with watch.listening(print):
        pass
    assert not run.path.exists()


def test_a_run_too_short_for_a_trace_says_so(run):
    run.train(1, 4)
    run.trace.finish()
    (line,) = run.said
    assert "nothing was traced, the run ended after 4 iterations" in line


def test_a_trace_that_cannot_be_written_is_said_and_training_goes_on(tmp_path):
    run = Run(tmp_path / "gone" / "trace.json")
    run.train(1, TRACED_STEP + 1)
    (line,) = run.said
    assert line.startswith(f"--memo-trace {run.path}: cannot be written (")
