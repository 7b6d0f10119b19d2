"""The page that a run leaves beside its checkpoints: what memo did, and why.

NOTE: it is a by-product
------------------------
* One rank writes it: the last, which has the losses (and Megatron's writers). No collective.
* It is written after `FIRST` steps, when ratio and plan are there, with every checkpoint, and at
  the end; whole or not at all.
* Whatever goes wrong with it is said once, and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_memo.plot.page import Part
    from megatron_memo.training.history import Entry

FILE_NAME = "report.html"
FIRST = 8
LOSS = "lm loss"
_TITLE = "Megatron-MEMO: this run"


class RunPage:
    """Watches training steps; `step` goes to `compat.wrap_train_step`.

    Args:
        path: of the page.
        interval: steps from one checkpoint to the next; None where only the end has one.
        parts: what the page shows, of the steps so far and of `scalars` told, by iteration.
        say: says a line, from this rank.
        link: tells Megatron's writers where the page is.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval: int | None,
        parts: Callable[[Sequence[Entry], Mapping[int, Mapping[str, float]]], Sequence[Part]],
        say: Callable[[str], None],
        link: Callable[[int, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from megatron_memo.training.history import History

        self._path = path
        self._interval = interval
        self._parts = parts
        self._say = say
        self._link = link
        self._clock = clock
        self._history = History()
        self._scalars: dict[int, dict[str, float]] = {}
        self._steps = 0
        self._linked = self._failed = False

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step, and writes the page if it is time."""
        start = self._clock()
        result = run()
        loss = result[0].get(LOSS)
        self._history.add(iteration, self._clock() - start, _detached(loss))
        self._steps += 1
        if self._steps == FIRST or (self._interval and iteration % self._interval == 0):
            self.write()
        return result

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """What an interval came to, for Megatron's writers and for the page."""
        self._scalars[iteration] = dict(values)

    def write(self) -> None:
        """Writes the page. Never raises for what is wrong with it or with the disk."""
        if self._failed:
            return
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 (a page is never worth a training run)
            self._failed = True
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._say(f"{self._path}: the run's report is not written from here on ({reason})")

    def _write(self) -> None:
        from megatron_memo.plan.atomic_file import whole_file
        from megatron_memo.plot.page import page

        entries = self._history.entries()
        content = page(_TITLE, self._parts(entries, self._scalars), lead=_lead(entries))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self._path) as file:
            file.write(content)
        if not self._linked:
            self._linked = True
            self._say(f"what memo does in this run is on a page, kept up to date: {self._path}")
            self._link(entries[-1].last if entries else 0, str(self._path))


def _detached(loss: Any) -> Any:
    """The tensor by itself: the next step may write over the one that was returned."""
    return loss.detach().clone() if hasattr(loss, "detach") else loss


def _lead(entries: Sequence[Entry]) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if not entries:
        return f"Written {written}, before the first iteration."
    return f"Iterations {entries[0].first} to {entries[-1].last}, written {written}."
