"""What swapping moved and what compute waited for it, told interval by interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.sizes import size_words
from megatron_memo.training.forecast import HOST, SWAPPED, largest, table

# Compute standing still for more than this part of a step is worth a line in the log.
WORTH_SAYING = 0.05

Stats = Mapping[str, float | None]
Gather = Callable[[Any], list[Any]]
# Summed over an interval; what else `SwapEngine.stats` tells is a level, not a flow.
_FLOWS = ("d2h_bytes", "h2d_bytes", "exposed_d2h_s", "exposed_h2d_s", "d2h_busy_s", "h2d_busy_s")
_DIRECTIONS = (("d2h", "D2H"), ("h2d", "H2D"))


class NothingSwapped(ValueError):
    """A swap ratio was given and no byte went to host memory in the first step."""


@dataclass(frozen=True)
class Flow:
    """One rank's traffic in a number of steps.

    Attributes:
        steps: how many.
        seconds: that these steps took.
        sums: of each of `_FLOWS`; None where the device can't tell.
        host_bytes: host memory held at the end.
    """

    steps: int
    seconds: float
    sums: Stats
    host_bytes: float

    def scalars(self) -> dict[str, float]:
        """Per iteration, by the name under which Megatron's writers get it (after `memo/`)."""
        named: dict[str, float] = {"host bytes": self.host_bytes}
        for key, name in _DIRECTIONS:
            moved, exposed = self.sums[f"{key}_bytes"], self.sums[f"exposed_{key}_s"]
            busy = self.sums[f"{key}_busy_s"]
            assert moved is not None
            named[f"{name} bytes"] = moved / self.steps
            if exposed is not None:
                named[f"exposed {name} seconds"] = exposed / self.steps
            if busy:
                named[f"{name} bytes per second"] = moved / busy
        return named

    def exposed_share(self) -> float:
        """The part of the steps' time in which compute waited for copies; 0 if nobody can tell."""
        waited = sum(self.sums[f"exposed_{key}_s"] or 0.0 for key, _ in _DIRECTIONS)
        return waited / self.seconds if self.seconds else 0.0


class Traffic:
    """Watches training steps; `begin` and `step` go to `compat.wrap_train_step`.

    Args:
        stats: the swap engine's, growing from the start of the process.
        clock: seconds.
        gather: collective; what each rank says, in rank order.
        log: says a line, from one rank.
        write: takes an iteration's scalars to Megatron's writers.
        time: takes seconds of an interval, by name, and its steps to Megatron's timers.
        foresee: bytes that these layers will move in an iteration and hold, by name.
        interval: steps from one report to the next.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        *,
        clock: Callable[[], float],
        gather: Gather,
        log: Callable[[str], None],
        write: Callable[[int, dict[str, float]], None],
        time: Callable[[dict[str, float], int], None],
        foresee: Callable[[Sequence[MemoTransformerLayer]], Mapping[str, float]],
        interval: int,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._gather = gather
        self._log = log
        self._write = write
        self._time = time
        self._foresee = foresee
        self._interval = interval
        self._layers: list[MemoTransformerLayer] = []
        self._others = 0
        self._checked = False
        self._told: set[str] = set()
        self._steps = 0
        self._start: Stats = {}
        self._began = 0.0

    def begin(self, chunks: Sequence[Any]) -> None:
        """Before the first step: sees which layers of the model may swap."""
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, MemoTransformerLayer):
                    self._layers.append(module)
                elif hasattr(module, "layer_number") and hasattr(module, "self_attention"):
                    self._others += 1

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step. The first, which starts everything up, is in no interval.

        Raises:
            NothingSwapped: after the first step, on every rank.
        """
        if self._steps == 0:
            self._start, self._began = self._stats(), self._clock()
        result = run()
        self._steps += 1
        if not self._checked:
            self._checked = True
            self._check_engaged()
            self._steps = 0
        elif iteration % self._interval == 0:
            self._tell(iteration)
        return result

    # ---- the first step

    def _check_engaged(self) -> None:
        moved = (self._stats()["d2h_bytes"] or 0) - (self._start["d2h_bytes"] or 0)
        swapping = [layer for layer in self._layers if not layer.resident]
        answers = self._gather((moved, len(swapping), len(self._layers), self._others))
        idle = [
            rank for rank, (bytes_, wanted, _, _) in enumerate(answers) if wanted and not bytes_
        ]
        if not idle and any(bytes_ for bytes_, _, _, _ in answers):
            self._compare(moved)
            return
        raise NothingSwapped(f"--memo-swap-ratio: {_why_idle(answers, idle)}")

    def _compare(self, moved: float) -> None:
        """Says how right the bill was that the run started on."""
        measured = {SWAPPED: moved, HOST: _host(self._stats())}
        answers = self._gather((dict(self._foresee(self._layers)), measured))
        predicted = largest([guess for guess, _ in answers])
        if predicted:
            found = [{name: row[name] for name in guess} for guess, row in answers]
            self._log(table(predicted, largest(found)))

    # ---- every interval

    def _tell(self, iteration: int) -> None:
        now = self._stats()
        flow = Flow(
            self._steps, self._clock() - self._began, _difference(now, self._start), _host(now)
        )
        self._steps = 0
        flows: list[Flow] = self._gather(flow)
        worst = max(flows, key=Flow.exposed_share)
        scalars = largest([each.scalars() for each in flows])
        self._write(iteration, scalars)
        self._time(
            {
                f"memo-exposed-{key}": flow.sums[f"exposed_{key}_s"] or 0.0
                for key, _ in _DIRECTIONS
                if flow.sums[f"exposed_{key}_s"] is not None
            },
            flow.steps,
        )
        said = "much" if worst.exposed_share() > WORTH_SAYING else "little"
        if said not in self._told:
            self._log(_line(worst, scalars, advise=said == "much"))
        self._told.add(said)


def _why_idle(answers: Sequence[tuple[float, int, int, int]], idle: Sequence[int]) -> str:
    """What is wrong, and what to change."""
    if idle:
        rank = idle[0]
        return (
            f"rank {rank} has {answers[rank][1]} layers that swap, and in the first iteration none "
            "of them sent a byte to host memory: they ran without gradients, or not at all. Check "
            "that the model trains these layers (frozen parts need no memo), or drop the flag."
        )
    if any(layers for _, _, layers, _ in answers):
        return (
            "all layers are among the last ones, which stay on the device, so no byte went to host "
            "memory. Lower --memo-resident-layers, or drop the flag."
        )
    others = sum(others for _, _, _, others in answers)
    return (
        f"none of the model's {others} layers is memo's, so no byte went to host memory. Something "
        "else on the command line chooses the layers; drop that, or drop --memo-swap-ratio."
    )


def _line(worst: Flow, scalars: Mapping[str, float], *, advise: bool) -> str:
    """The interval in one sentence, of the rank that moved or waited most."""
    parts = []
    for _, name in _DIRECTIONS:
        part = f"{size_words(scalars[f'{name} bytes'])} {name} an iteration"
        rate = scalars.get(f"{name} bytes per second")
        parts.append(part if rate is None else f"{part} at {size_words(rate)}/s")
    waited = f"compute waited {worst.exposed_share():.1%} of the time"
    if all(worst.sums[f"exposed_{key}_s"] is None for key, _ in _DIRECTIONS):
        waited = "this device does not tell how long compute waited"
    line = f"swapped {', '.join(parts)}; {waited}"
    if advise:
        line += (
            ". A lower --memo-swap-ratio moves less (auto finds the best), a larger "
            "--memo-prefetch-depth starts earlier"
        )
    return f"{line}. (Said once; the writers get every interval.)"


def _difference(now: Stats, then: Stats) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in _FLOWS:
        a, b = now.get(name), then.get(name)
        found[name] = None if a is None or b is None else a - b
    return found


def _host(stats: Stats) -> float:
    return stats["host_bytes"] or 0.0
