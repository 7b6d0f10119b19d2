"""The portfolio: several ways to a layout, in turns of growing length, until one meets the goal.

Worker threads take the next arm in line, run one step of it and put it back. All arms report to a
board that verifies every layout; the first layout at the goal, or a proof that there is none, stops
the rest. The heavy arms release Python's global lock while they work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Protocol

from . import native
from .advance import Advance
from .arms import CanonicalArm, GreedyArm, SqueakyArm
from .bilevel import BiLevel
from .board import Board, Incumbent
from .canonical import UNLIMITED
from .cp_sat import CpSatArm
from .hot_first import HotFirst
from .passes import Pass
from .problem import Problem

# First step of each arm; every following one is GROWTH times longer.
FIRST_SECONDS = 1.0
FIRST_NODES = 200_000
# It mostly needs one run through the iteration, and has nothing to offer before the end of it.
ADVANCE_SECONDS = 40.0
GROWTH = 1.6
MANY_BUFFERS = 1200
FLAT_FIRST = 20_000


class Status(Enum):
    SOLVED = "solved"
    INFEASIBLE = "infeasible"
    UNSOLVED = "unsolved"  # no layout below the capacity in time


class Arm(Protocol):
    """`step` works for at most so long; False when there is nothing more to try."""

    name: str

    def step(self, seconds: float, nodes: int) -> bool: ...


@dataclass(frozen=True)
class Solution:
    """What the portfolio knows at its end. `best` was verified; it may be above the capacity when
    the status is not SOLVED."""

    status: Status
    best: Incumbent | None
    bound: int
    bound_by: str
    seconds: float
    cpu_seconds: float
    interrupted: bool
    timed_out: bool
    compiled: bool

    @property
    def gap(self) -> int | None:
        """Peak minus proven bound; 0 means proven optimal."""
        return None if self.best is None else self.best.peak - self.bound


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    workers: int = 2,
    seed: int = 0,
    deterministic: bool = False,
    use_cp_sat: bool = True,
    passes: Sequence[Pass] = (),
    progress: Callable[[Incumbent, int], None] | None = None,
) -> Solution:
    """Solves until goal, proof, deadline or Ctrl-C (which returns the best layout so far).

    Args:
        problem: with a capacity, any layout below it ends the search; without one only a peak equal
            to the proven bound does.
        time_limit: wall seconds.
        workers: threads, at least 1.
        seed: for everything random.
        deterministic: one worker, and steps limited by work instead of time: the same result every
            time unless the time limit cuts it short.
        use_cp_sat: whether CP-SAT takes part (ortools is needed then).
        passes: the structure of a training iteration, for the arms that use it.
        progress: called with every better layout and the bound, from any thread.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}, it must be at least 1")
    if not time_limit > 0:
        raise ValueError(f"the time limit is {time_limit} s, it must be above 0")
    cpu = time.process_time()
    board = Board(problem, time_limit, progress)
    if not board.infeasible:
        crew = _Crew(board, seed, deterministic, use_cp_sat, passes)
        crew.work(1 if deterministic else workers)
        interrupted = crew.interrupted
        if board.best is None:
            # Stopped before the first greedy pass: at least something that is right.
            board.offer([0, *accumulate(board.reduced.size)][:-1], "stacking end to end")
    else:
        interrupted = False
    return Solution(
        status=_status(board),
        best=board.best,
        bound=board.bound,
        bound_by=board.bound_by,
        seconds=time.monotonic() - board.started,
        cpu_seconds=time.process_time() - cpu,
        interrupted=interrupted,
        timed_out=not board.decided and not interrupted and board.seconds_left <= 0,
        compiled=native.library() is not None,
    )


def _status(board: Board) -> Status:
    if board.infeasible:
        return Status.INFEASIBLE
    capacity = board.problem.capacity
    if board.best is None or (capacity is not None and board.best.peak > capacity):
        return Status.UNSOLVED
    return Status.SOLVED


@dataclass
class _Turn:
    arm: Arm
    seconds: float
    nodes: float


class _Crew:
    """Arms in line and the threads that run them."""

    def __init__(
        self,
        board: Board,
        seed: int,
        deterministic: bool,
        use_cp_sat: bool,
        passes: Sequence[Pass],
    ) -> None:
        self.board = board
        self.deterministic = deterministic
        self.interrupted = False
        self._error: BaseException | None = None
        self._running = 0
        self._line_changed = threading.Condition()
        canonical, squeaky = CanonicalArm(board, seed), SqueakyArm(board, seed)
        arms: list[Arm] = [GreedyArm(board)]
        if native.library() is None:
            arms += [squeaky, canonical]
        elif board.reduced.count > MANY_BUFFERS:
            arms += [HotFirst(board, seed), canonical, squeaky]
        else:
            arms += [canonical, squeaky, HotFirst(board, seed)]
        if use_cp_sat:
            arms.append(CpSatArm(board, seed, deterministic=deterministic))
        if passes:
            # Flat greedy passes over very many buffers take longer than what the structure saves.
            at = 1 if board.reduced.count <= FLAT_FIRST else 0
            arms[at:at] = [Advance(board, passes, seed), BiLevel(board, passes, seed)]
        self._line = deque(
            _Turn(arm, ADVANCE_SECONDS if isinstance(arm, Advance) else FIRST_SECONDS, FIRST_NODES)
            for arm in arms
        )

    def work(self, workers: int) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"solver-{k}", daemon=True)
            for k in range(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            while self.board.going() and any(thread.is_alive() for thread in threads):
                self.board.wait(0.05)
        except KeyboardInterrupt:
            self.interrupted = True
        self.board.halt()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while self.board.going():
                turn = self._next()
                if turn is None:
                    return
                more = self._step(turn)
                with self._line_changed:
                    self._running -= 1
                    if more:
                        turn.seconds *= GROWTH
                        turn.nodes *= GROWTH
                        self._line.append(turn)
                    self._line_changed.notify_all()
        except Exception as error:  # noqa: BLE001 - handed to the thread that called solve()
            self._error = error
            self.board.halt()
        finally:
            with self._line_changed:
                self._line_changed.notify_all()

    def _step(self, turn: _Turn) -> bool:
        # Deterministic runs must not depend on the clock; the stop flag still ends them in time.
        seconds = 1e9 if self.deterministic else turn.seconds
        nodes = int(turn.nodes) if self.deterministic else UNLIMITED
        try:
            return turn.arm.step(seconds, nodes)
        except MemoryError:
            return False  # this arm needs more than there is; the others go on

    def _next(self) -> _Turn | None:
        """The next arm in line; None when none is left and none can come back."""
        with self._line_changed:
            while not self._line:
                if self._running == 0 or not self.board.going():
                    return None
                self._line_changed.wait(0.05)
            self._running += 1
            return self._line.popleft()
