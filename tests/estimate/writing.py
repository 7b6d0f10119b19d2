"""Backend and clock that write down what the engine, real and simulated, asks of them."""

import itertools

from megatron_memo.estimate.clock import D2H, Clock
from megatron_memo.swap.meta import MetaBackend

# Forward and backward of micro-batches; the second is what a pipeline's first stage does.
ORDERS = {
    "one": ["f0", "b0"],
    "several in flight": ["f0", "f1", "b0", "f2", "b1", "b2"],
}


class WritingBackend(MetaBackend):
    """Writes down copies and waits, with the bytes of what they are of."""

    def __init__(self):
        self.log = []

    def compute_waits(self, event):
        if event is not None:
            self.log.append(("wait", *event))
        return 0.0

    def record_compute(self):
        return None

    def d2h(self, copies, after):
        return self._copied("d2h", copies)

    def h2d(self, copies, after):
        return self._copied("h2d", copies)

    def _copied(self, kind, copies):
        event = (kind, sum(copy.device.numel() for copy in copies))
        self.log.append(event)
        return event


class WritingClock(Clock):
    """Likewise, for the simulation; a copy is known by when it is done."""

    def __init__(self):
        super().__init__(stage=0)
        self.log, self._done = [], {}

    def run(self, stream, seconds, name, phase, after=0.0, nbytes=0):
        done = super().run(stream, seconds, name, phase, after, nbytes)
        event = ("d2h" if stream == D2H else "h2d", nbytes)
        self.log.append(event)
        self._done[stream, done] = event
        return done

    def wait(self, stream, until):
        self.log.append(("wait", *self._done[stream, until]))
        super().wait(stream, until)


def in_runs(log):
    """The log without the order of what is asked for at once."""
    return [sorted(run) for _, run in itertools.groupby(log, key=lambda entry: entry[:-1])]
