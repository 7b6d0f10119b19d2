"""`--memo-swap-ratio auto`: measured in a run's first steps, solved, agreed, and then fixed.

NOTE: the life of a run, in its own steps from 1
-----------------------------------------------
    1      warms up at ratio 0, which fits if anything does
    2      measured at ratio 0: seconds of a layer's parts, bytes that always move
    3      measured with a chunk swapped: bytes of the other tensors, and seconds once more: of the
           two steps the faster counts, for whatever else the machine does makes a step longer.
           After it all ranks copy at once for half a second, and solve.
    4..    with the ratio. A memory plan counts its steps from here.
With a file of measurements, or what an earlier run saved, the ratio is there before step 1.

All ranks take the smallest ratio that one of them found: ranks of a tensor-parallel group must cut
at the same row, the stages of a pipeline wait for one another anyway, and less swapping fits
wherever more did. Every rank solves and says how it went before any goes on, so that none is left
in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_memo import phases
from megatron_memo.config import PROVISIONAL_RATIO
from megatron_memo.layer.chunks import chosen_chunks, swapped_rows
from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.plan.ratio import Choice, Limit, Link
from megatron_memo.profile.markers import mark_model
from megatron_memo.sizes import size_words
from megatron_memo.training.layer_times import LayerTimes, LayerWatch, differ_by
from megatron_memo.training.measurements import Measured

WARM_UP, TIMED, WEIGHED = 1, 2, 3
# Of two measured steps that differ by more, something else than layers took the time.
_BUSY = 0.25


class NoRatio(ValueError):
    """No ratio can be chosen; every rank raises it, with what each has to say."""


@dataclass(frozen=True)
class Known:
    """Measurements that are there before the first step.

    Attributes:
        measured: of this rank.
        ratio: chosen from them by an earlier run, to be kept; None to choose now.
        source: for the log.
    """

    measured: Measured | None
    ratio: float | None
    source: str


class Steps(Protocol):
    """What waits for the ratio: see `training.planned.PlannedSteps`."""

    def begin(self, chunks: Sequence[Any]) -> None: ...

    def step(self, iteration: int, run: Callable[[], Any]) -> Any: ...


@dataclass(frozen=True)
class _Timed:
    """A measured step: of its layers, and seconds of all of it."""

    times: LayerTimes
    seconds: float

    @property
    def besides(self) -> float:
        """Seconds outside of the layers."""
        times = self.times
        layer = times.forward.total + times.backward.total + times.recompute
        return max(self.seconds - times.passes * layer, 0.0)


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of what it found."""

    error: str | None = None
    choice: Choice | None = None
    measured: Measured | None = None


class AutoRatio:
    """Finds the ratio; `begin` and `step` go to `compat.wrap_train_step`.

    Args:
        known: asked once, before the first step; ValueError refuses the run.
        watch: times layers.
        stats: the swap engine's totals.
        probe: measures the link. Collective.
        solve: the best decision for this rank; ValueError where nothing fits.
        predict: seconds of a step of this rank at a ratio.
        fits: whether a ratio's activations have room in host memory, by the run's own bill.
        device_room: bytes for buffers, asked after the timed step; None where nobody can tell.
        gather: collective; what each rank says, in rank order.
        release: gives host memory up that was cut for other ratios: blocks of another size leave
            gaps in it that a tight budget has no room for.
        save: keeps all ranks' measurements and the ratio.
        log: says a line, from one rank.
    """

    def __init__(
        self,
        *,
        known: Callable[[], Known | None],
        watch: LayerWatch,
        stats: Callable[[], dict[str, Any]],
        probe: Callable[[], Link],
        solve: Callable[[Measured], Choice],
        predict: Callable[[Measured, float], float],
        fits: Callable[[float], bool],
        device_room: Callable[[int], int | None],
        gather: Callable[[Any], list[Any]],
        release: Callable[[], None],
        save: Callable[[Sequence[Measured | None], float], None],
        log: Callable[[str], None],
    ) -> None:
        self._known = known
        self._watch = watch
        self._stats = stats
        self._probe = probe
        self._solve = solve
        self._predict = predict
        self._fits = fits
        self._device_room = device_room
        self._gather = gather
        self._release = release
        self._save = save
        self._log = log
        self._step = 0
        self._chunks: Sequence[Any] = ()
        self._layers: list[MemoTransformerLayer] = []
        self._waiting: list[Steps] = []
        self._watched_steps: list[_Timed] = []
        self._always = self._more = 0.0
        self._rows = 0
        self.ratio: float | None = None

    # ---- what the training loop is wrapped in

    def begin(self, chunks: Sequence[Any]) -> None:
        """Before the first step: takes what is known already.

        Raises:
            NoRatio: on every rank, if the measurements that were given do not suit some rank.
        """
        self._chunks = chunks
        self._layers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, MemoTransformerLayer)
        ]
        self._set(PROVISIONAL_RATIO)  # what the first two steps rely on
        known, error = None, None
        try:
            known = self._known()
        except ValueError as refusal:
            error = str(refusal)
        answers = self._gather((error, known and (known.source, known.ratio)))
        _raise_if_any([error for error, _ in answers])
        found = {answer for _, answer in answers}
        if known is None or len(found) > 1 or None in found:
            return
        if known.ratio is None:
            self._choose(known.measured, known.source)
        else:
            # Into this run's folder, which may be another.
            self._save(self._gather(known.measured), known.ratio)
            self._fix(known.ratio)
            self._log(f"swap ratio {known.ratio:g}, {known.source}")

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step, and measures it if it is that step's turn.

        Raises:
            NoRatio: on every rank, after the last measured step.
        """
        if self.ratio is not None:
            return run()
        self._step += 1
        if self._step == WARM_UP:
            return run()
        if self._step == TIMED:
            return self._timed(run)
        result = self._weighed(run)
        self._choose(self._measured(), "")
        return result

    def before(self, steps: Steps) -> Callable[[int, Callable[[], Any]], Any]:
        """A step function for what must not begin before the ratio is fixed."""
        self._waiting.append(steps)

        def step(iteration: int, run: Callable[[], Any]) -> Any:
            return run() if self.ratio is None else steps.step(iteration, run)

        return step

    # ---- measuring

    def _timed(self, run: Callable[[], Any]) -> Any:
        before = self._moved()
        result = self._watched(run)
        if self._layers:
            self._always = (self._moved() - before) / self._swapping_passes()
        return result

    def _watched(self, run: Callable[[], Any]) -> Any:
        """Runs a step and notes what its layers took."""
        undo = mark_model(self._chunks)
        start = time.perf_counter()
        phases.begin_iteration()
        try:
            with self._watch.listening():
                result = run()
        finally:
            undo()
        seconds = time.perf_counter() - start
        if self._layers:
            self._watched_steps.append(_Timed(self._watch.times(), seconds))
        return result

    def _weighed(self, run: Callable[[], Any]) -> Any:
        """With about one chunk swapped, or as much of one as fits; `_rows` of a layer's are."""
        if not self._layers:
            return run()
        rows, chunks = self._shape()
        ratio = 1 / max(chunks, 2)
        while ratio * rows >= 1 and not self._fits(ratio):
            ratio /= 2
        self._rows = swapped_rows(ratio, rows) if ratio * rows >= 1 else 0
        if self._rows == 0:
            # Not even a row fits besides what always moves: of any size they would not.
            self._rows, self._more = 1, self._always
            return self._watched(run)
        self._set(ratio)
        before = self._moved()
        try:
            return self._watched(run)
        finally:
            moved = (self._moved() - before) / self._swapping_passes()
            self._more = max(moved - self._always, 0.0)
            self._set(PROVISIONAL_RATIO)

    def _measured(self) -> Measured | None:
        link = self._probe()
        if not self._layers or not self._watched_steps:
            return None
        first, second = self._watched_steps[0].times, self._watched_steps[-1].times
        times = min(first, second, key=lambda one: one.forward.total + one.backward.total)
        rows, chunks = self._shape()
        always = round(self._always)
        return Measured(
            layers=len(self._layers),
            resident=len(self._layers) - len(self._swapping()),
            micro_batches=max(times.passes // len(self._layers), 1),
            rows=rows,
            chunks=chunks,
            forward=times.forward,
            backward=times.backward,
            recompute=first.recompute,  # of all rows
            always=always,
            others=round(self._more * rows / max(self._rows, 1)),
            link=link,
            other_seconds=min(step.besides for step in self._watched_steps),
            device=self._device_room(always),
            unsteady=differ_by(first, second),
        )

    def _shape(self) -> tuple[int, int]:
        """Rows of a layer's input on this rank, and chunks."""
        layer = self._layers[0]
        assert layer.rows_seen is not None, "a layer has run"
        rows, ranks = layer.rows_seen
        return rows, layer.memo.chunks or chosen_chunks(rows * ranks)

    def _swapping(self) -> list[MemoTransformerLayer]:
        return [layer for layer in self._layers if not layer.resident]

    def _swapping_passes(self) -> float:
        passes = self._watched_steps[0].times.passes
        return max(len(self._swapping()) * passes / len(self._layers), 1)

    def _moved(self) -> float:
        return self._stats()["d2h_bytes"] or 0.0

    # ---- choosing

    def _choose(self, measured: Measured | None, source: str) -> None:
        """Solves on every rank and takes what suits all."""
        choice, error = None, None
        if measured is not None:
            try:
                choice = self._solve(measured)
            except ValueError as refusal:
                error = str(refusal)
        answers: list[Told] = self._gather(Told(error, choice, measured))
        _raise_if_any([told.error for told in answers])
        found = [told for told in answers if told.choice is not None]
        if not found:
            raise NoRatio("--memo-swap-ratio auto: no rank has a layer of memo's to measure")
        least = min(found, key=_ratio_of)
        assert least.choice is not None and least.measured is not None
        ratio = least.choice.ratio
        mine = None if measured is None else self._predict(measured, ratio)
        slowest = max(seconds for seconds in self._gather(mine) if seconds is not None)
        self._save([told.measured for told in answers], ratio)
        self._fix(ratio)
        unsteady = max(told.measured.unsteady for told in answers if told.measured is not None)
        self._log(_line(least.choice, least.measured.link, slowest, source, unsteady))

    def _fix(self, ratio: float) -> None:
        self._set(ratio)
        self._release()
        self.ratio = ratio
        for steps in self._waiting:
            steps.begin(self._chunks)

    def _set(self, ratio: float) -> None:
        for layer in self._layers:
            layer.memo = replace(layer.memo, swap_ratio=ratio)


def _ratio_of(told: Told) -> float:
    assert told.choice is not None
    return told.choice.ratio


def _raise_if_any(errors: Sequence[str | None]) -> None:
    said = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if said:
        raise NoRatio(f"--memo-swap-ratio auto: {'; '.join(dict.fromkeys(said))}")


def _line(choice: Choice, link: Link, step_seconds: float, source: str, unsteady: float) -> str:
    """The ratio, why, and what would help."""
    busy = ""
    if unsteady > _BUSY:
        busy = (
            f"; a layer took {unsteady:.0%} longer in one of the two measured steps than in the "
            "other, which counts: the machine was busy, or compute waited for copies"
        )
    if choice.binds is Limit.COMPUTE:
        why = "nothing would make a step shorter but faster compute"
    else:
        cost = next(each for each in choice.relaxed if each.limit is choice.binds)
        why = (
            f"bound by {choice.binds.value}: 10% more would save "
            f"{cost.saves_with_a_tenth_more:.3g} s a step, no limit {cost.saves_without:.3g} s"
        )
    waits = choice.exposed_d2h + choice.exposed_h2d
    return (
        f"swap ratio {choice.ratio:.4g} ({why}); a step should take {step_seconds:.3g} s, "
        f"{waits:.3g} s of it waiting for copies; {source or 'measured'}: "
        f"{size_words(link.d2h)}/s to the host, {size_words(link.h2d)}/s back with all ranks of a "
        f"node copying{busy}"
    )
