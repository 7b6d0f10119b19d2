"""``--memo-plan``: training steps whose memory comes from planned addresses.

NOTE: the life of a run, in its own steps from 1
-----------------------------------------------
    1..2   native; the second still makes lazy allocations (optimizer state, caches)
    3      recorded: every rank notes its own requests
    4      native; the plan is made on another thread
    5..    replayed. Before step 5 every rank waits for its plan, then all tell one another how it
           went: they switch together or not at all.
With a plan from a file, or one saved by an earlier run of the same settings, replay begins at step
2: what the first step allocates for good (optimizer state, caches, RoPE tables) must not settle in
the arena. A step that an exception breaks off is followed by one that starts afresh; if it was the
recorded one, the next is recorded instead. Evaluation, checkpoints and logging lie between steps
and are never planned.

Safety does not depend on any of this: the allocator checks each address before it gives it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_memo import phases
from megatron_memo.allocator.face import Allocator, PlanEntry
from megatron_memo.allocator.library import NO_PHASE
from megatron_memo.allocator.record import to_trace
from megatron_memo.phases import START, Phase
from megatron_memo.plan.plan_file import Plan, PlanError, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.profile import markers
from megatron_memo.profile.trace import Header, write_trace
from megatron_memo.sizes import size_words

RECORDED_STEP, FIRST_REPLAYED_STEP, READY_PLAN_STEP = 3, 5, 2
# One thread beside training, for at most so long; a plan takes seconds.
SEARCH = Search(time_limit=30.0, workers=1)

Log = Callable[[str], None]
Write = Callable[[int, dict[str, float]], None]  # iteration, scalars by name
# Every rank's answer to a question, in rank order.
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Identity:
    """What this rank's plan is of: the device, the rank, and everything that decides requests."""

    device: str
    rank: int
    world_size: int
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """What a rank begins with.

    Attributes:
        identity: of the rank.
        plan: a verified plan for it, or None to make one from the recorded step.
        save: where a plan made here is kept, with the trace it is of beside it; or None.
    """

    identity: Identity
    plan: Plan | None = None
    save: Path | None = None


class PlannedSteps:
    """Records, plans and replays training steps; `step` and `begin` go to `compat.wrap_train_step`,
    with `markers.forward_backward`.

    Args:
        allocator: of this process.
        starting: asked once, with the model's chunks; raises ValueError to refuse the run.
        budget: bytes that the arena may have; None for no limit.
        gather: collective; called the same number of times on all ranks.
        log: says a line, from one rank.
        write: takes scalars to Megatron's writers.
        interval: steps from one report to the next.
    """

    def __init__(
        self,
        allocator: Allocator,
        starting: Callable[[Sequence[Any]], Start],
        *,
        budget: int | None,
        gather: Gather,
        log: Log,
        write: Write,
        interval: int,
    ) -> None:
        self._allocator = allocator
        self._starting = starting
        self._start: Start | None = None
        self._plan: Plan | None = None
        self._budget = budget
        self._gather = gather
        self._log = log
        self._write = write
        self._interval = interval
        self._step = 0
        self._recording = self._recorded = False
        self._planner: _Planner | None = None
        self._numbers: dict[Phase, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._told = (0, 0)  # misses in the last interval
        self.replaying = False

    # ---- what the training loop is wrapped in

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Markers reach the allocator inside the body; after it nothing is planned any more."""
        try:
            with phases.listening(self._enter):
                yield
        finally:
            self._allocator.off()
            for undo in self._undo:
                undo()

    def begin(self, chunks: Sequence[Any]) -> None:
        """Before the first step: marks the model and decides with all ranks what to begin with.

        Raises:
            PlanError: on every rank, if the given plan does not suit some rank.
        """
        self._undo = [markers.mark_model(chunks), markers.mark_updates()]
        start, refusal = None, None
        try:
            start = self._starting(chunks)
        except ValueError as error:
            refusal = str(error)
        answers = self._gather((refusal, start is not None and start.plan is not None))
        refused = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(answers) if said]
        if refused:
            raise PlanError("; ".join(refused))
        assert start is not None
        self._start = start
        if all(has_plan for _, has_plan in answers):
            self._plan = start.plan

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Runs one training step in the mode whose turn it is."""
        self._step += 1
        self._before_step()
        self._allocator.reset_stats()
        self._allocator.begin_iteration()
        phases.begin_iteration()
        self._enter(START)
        try:
            result = run()
        finally:
            self._allocator.end_iteration()
        self._after_step(iteration)
        return result

    @property
    def plan_in_use(self) -> Plan | None:
        """The plan that steps are replayed by; None while there is none."""
        return self._plan if self.replaying else None

    def report(self) -> dict[str, Any]:
        """What the run's report says about the plan."""
        plan = self.plan_in_use
        return {
            "replayed": self.replaying,
            "arena_bytes": plan and plan.arena,
            "lower_bound": plan and plan.bound,
            "steps": self._rows,
        }

    # ---- recording and planning

    def _before_step(self) -> None:
        if self.replaying:
            return
        if self._plan is not None:
            if self._step == READY_PLAN_STEP:
                self._switch(None)
        elif self._planner is not None:
            if self._step >= FIRST_REPLAYED_STEP:
                self._plan, error = self._planner.wait()
                self._switch(error)
                self._planner = None
        elif not self._recorded and self._step >= RECORDED_STEP:
            self._allocator.start_recording()
            self._recording = True

    def _after_step(self, iteration: int) -> None:
        self._rows.append({"iteration": iteration, **asdict(self._allocator.stats())})
        if self.replaying and iteration % self._interval == 0:
            self._tell(iteration)
        if self._recording:
            self._recording, self._recorded = False, True
            self._planner = _Planner(self._planning(iteration))

    def _planning(self, iteration: int) -> Callable[[], Plan]:
        """What makes a plan of the iteration just recorded."""
        assert self._start is not None
        identity = self._start.identity
        raw = self._allocator.stop_recording()
        names = {number: phase for phase, number in self._numbers.items()}
        header = Header(
            source="allocator",
            device=identity.device,
            rounding=self._allocator.alignment,
            rank=identity.rank,
            world_size=identity.world_size,
            iteration=iteration,
            fingerprint=identity.fingerprint,
            same_ranks=(identity.rank,),
        )

        save = self._start.save

        def make() -> Plan:
            trace = to_trace(raw, names, header)
            if save is not None:
                save.parent.mkdir(parents=True, exist_ok=True)
                write_trace(save.with_name(trace_name(save.name)), trace)
            return make_plan([Source(f"iteration {iteration}", "", trace)], SEARCH).plan

        return make

    def _switch(self, error: str | None) -> None:
        """All ranks replay from here on, or none does."""
        if error is None:
            error = self._load()
        answers = self._gather((error, 0 if self._plan is None else self._plan.arena))
        failed = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(answers) if said]
        if failed:
            self._allocator.off()
            self._log(f"no memory plan, training goes on without one ({'; '.join(failed)})")
            return
        self._allocator.replay()
        self.replaying = True
        assert self._plan is not None
        largest = max(arena for _, arena in answers)
        proof = f"{size_words(self._plan.gap)} above the proven lower bound"
        self._log(
            f"memory plan in use from here on: arena of {size_words(largest)}, "
            f"{proof if self._plan.gap else 'proven to be the least'}"
        )

    def _load(self) -> str | None:
        """Gives the plan to the allocator; the reason if that fails."""
        plan, start = self._plan, self._start
        assert plan is not None and start is not None
        if self._budget is not None and plan.arena > self._budget:
            return (
                f"--memo-device-budget {self._budget}: the plan's arena needs {plan.arena} bytes; "
                "raise the budget, or lower --memo-swap-ratio"
            )
        (window,) = plan.windows
        entries = [
            PlanEntry(self._number(window.phases[e.phase]), e.size, e.stream, e.offset)
            for e in window.entries
        ]
        try:
            self._allocator.load_plan(entries, plan.arena)
            if start.save is not None and plan is not start.plan:
                write_plan(start.save, plan)
        except (ValueError, OSError) as refusal:
            return str(refusal)
        return None

    # ---- what was seen

    def _tell(self, iteration: int) -> None:
        """Scalars of the last interval; a line only if the plan was not followed throughout."""
        rows = self._rows[-self._interval :]
        total = {name: sum(row[name] for row in rows) for name in rows[0]}
        wanted = total["requests"] - total["native_entries"]
        self._write(
            iteration,
            {
                "plan hit rate": total["hits"] / max(wanted, 1),
                "plan misses": wanted - total["hits"],
                "native mallocs": total["native_mallocs"],
                "arena peak bytes": max(row["arena_peak"] for row in rows),
            },
        )
        missed = total["miss_unknown"], total["miss_occupied"]
        if missed != self._told and wanted != total["hits"]:
            self._log(
                f"memory plan: {total['hits']} of {wanted} requests were served at their "
                f"addresses; {total['miss_unknown']} are not in the plan, the place of "
                f"{total['miss_occupied']} was in use. The native allocator served these. (Said "
                "again only when the numbers change.)"
            )
        self._told = missed

    # ---- markers

    def _enter(self, phase: Phase) -> None:
        collective = phase.part == phases.COLLECTIVE
        self._allocator.enter(NO_PHASE if collective else self._number(phase))

    def _number(self, phase: Phase) -> int:
        number = self._numbers.get(phase)
        if number is None:
            number = self._numbers[phase] = len(self._numbers)
            self._allocator.name_phases({number: str(phase)})
        return number


def trace_name(plan_name: str) -> str:
    """The name of the trace beside a plan."""
    return plan_name.replace(".plan.jsonl", ".trace.jsonl.gz")


class _Planner:
    """Makes a plan on a thread of its own; the solvers' heavy parts leave Python's lock alone."""

    def __init__(self, make: Callable[[], Plan]) -> None:
        self._make = make
        self._plan: Plan | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="memo-planner", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._plan = self._make()
        except (ValueError, OSError) as error:  # what planner, trace and disk refuse
            self._error = str(error)

    def wait(self) -> tuple[Plan | None, str | None]:
        """The plan, or the reason why there is none."""
        self._thread.join()
        if self._plan is None and self._error is None:
            self._error = "the planner broke off; its traceback is above"
        return self._plan, self._error
