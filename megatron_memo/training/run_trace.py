"""``--memo-trace``: one real iteration as a Chrome trace, in the lanes of the estimate's.

NOTE: what is measured
----------------------
* Compute: a phase lasts from its marker to the next one, on a GPU by events on the compute stream,
  so a wait for a copy or for another rank is part of the phase that waits. What is computed again
  is told apart.
* Copies: from the beginning to the end of each batch, on a GPU by events on the copy's own stream.
  The phase of a copy is the one in which it was queued; on a CPU, in which it ended.
* Nothing waits inside of the iteration; events are read after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_memo import phases
from megatron_memo.estimate.chrome import chrome_events
from megatron_memo.estimate.clock import COMPUTE, Event
from megatron_memo.layer.recompute_watch import watching
from megatron_memo.phases import START, Phase
from megatron_memo.swap import watch
from megatron_memo.training.layer_times import CudaClock, HostClock, Mark

if TYPE_CHECKING:
    from megatron_memo.profile.markers import Undo

# Of the run, counted from 1: with everything found by the run itself, replay begins at step 8.
TRACED_STEP = 10


class RunTrace:
    """Traces one step; `begin` and `step` go to `compat.wrap_train_step`.

    Args:
        path: of the trace, which is written whole or not at all.
        clock: of compute.
        mark: hooks markers into the model for the traced step, where nobody else has done so.
        ready: whether what is tried out in first steps (the swap ratio) is settled.
        rank: of this process, for the trace's title.
        log: says a line.
    """

    def __init__(
        self,
        path: Path,
        clock: HostClock | CudaClock,
        *,
        mark: Callable[[Sequence[Any]], Undo] | None,
        ready: Callable[[], bool],
        rank: int,
        log: Callable[[str], None],
    ) -> None:
        self._path = path
        self._clock = clock
        self._mark = mark
        self._ready = ready
        self._rank = rank
        self._log = log
        self._chunks: Sequence[Any] = ()
        self._steps = 0
        self._done = False
        self._marks: list[tuple[Phase | None, Mark]] = []
        self._copies: list[tuple[str, Mark, Mark, int, Phase]] = []
        self._phase = START

    def begin(self, chunks: Sequence[Any]) -> None:
        """Before the first step: the model's chunks."""
        self._chunks = chunks

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step, and traces it if it is the one."""
        self._steps += 1
        if self._done or self._steps < TRACED_STEP or not self._ready():
            return run()
        self._done = True
        with self._watching():
            result = run()
        self._clock.settle()
        self._write(iteration)
        return result

    def finish(self) -> None:
        """Says so where the run ended before the traced step."""
        if not self._done:
            self._log(
                f"--memo-trace {self._path}: nothing was traced, the run ended after "
                f"{self._steps} iterations. Train for {TRACED_STEP} at least."
            )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._mark is not None:
                stack.callback(self._mark(self._chunks))
                phases.begin_iteration()
            stack.enter_context(watch.listening(self._copied))
            stack.enter_context(watching(lambda _: self._note(None)))
            stack.enter_context(phases.listening(self._note))
            self._note(START)
            yield
            self._note(START)

    def _note(self, phase: Phase | None) -> None:
        """A phase begins; or, with None, a recomputation begins or ends."""
        self._marks.append((phase, self._clock.mark()))
        self._phase = phase or self._phase

    def _copied(self, direction: str, start: Mark, end: Mark, nbytes: int) -> None:
        self._copies.append((direction, start, end, nbytes, self._phase))

    # ---- what was seen

    def events(self) -> list[Event]:
        """Compute and copies of the traced step, seconds from its beginning."""
        _, base = self._marks[0]
        found, phase, again = [], START, False
        for (begins, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if begins is None:
                again = not again
            else:
                phase = begins
            seconds = self._clock.seconds(start, end)
            if seconds > 0:
                name = "again" if again else phase.direction or phase.part
                at = self._clock.seconds(base, start)
                found.append(Event(0, COMPUTE, at, seconds, name, phase))
        for direction, start, end, nbytes, phase in list(self._copies):
            at, seconds = self._clock.seconds(base, start), self._clock.seconds(start, end)
            if seconds > 0:
                found.append(Event(0, direction, at, seconds, "copy", phase, nbytes))
        return found

    def _write(self, iteration: int) -> None:
        from megatron_memo.plan.atomic_file import whole_file

        content = {
            "displayTimeUnit": "ms",
            "otherData": {"iteration": iteration, "rank": self._rank, "written": time.time()},
            "traceEvents": chrome_events(0, f"rank {self._rank}, measured", self.events()),
        }
        try:
            with whole_file(self._path) as file:
                json.dump(content, file)
        except OSError as error:
            self._log(f"--memo-trace {self._path}: cannot be written ({error.strerror or error})")
            return
        self._log(
            f"iteration {iteration} of rank {self._rank} is in {self._path}: open it at "
            "https://ui.perfetto.dev"
        )
