"""CP-SAT as an arm: NoOverlap2D as a feasibility problem at the goal, and certification.

Feasibility at one capacity is CP-SAT's best form for this problem; minimising from a complete hint
is its way to prove a bound above the load. ortools is imported when the arm starts: it takes about
a second.
"""

from __future__ import annotations

import math
import threading
from typing import Any

from .board import Board
from .reduced import Reduced

NAME = "CP-SAT"
# Beyond this the model takes longer to build than it is worth.
LARGEST_COUNT = 3000
# CP-SAT wants every sum of its variables to stay well within 64 bits.
LARGEST_OFFSET = 2**55


class CpSatArm:
    """Steps alternate between feasibility at the goal and certification of the best peak."""

    name = NAME

    def __init__(self, board: Board, seed: int, *, deterministic: bool) -> None:
        self.board = board
        self.seed = seed
        self.deterministic = deterministic
        self._steps = 0

    def step(self, seconds: float, nodes: int) -> bool:
        board, problem = self.board, self.board.reduced
        if problem.count > LARGEST_COUNT or board.goal > LARGEST_OFFSET:
            return False
        try:
            from ortools.sat.python import cp_model
        except ImportError:
            return False  # the portfolio does without; `megatron-memo env` lists what is missing
        self._steps += 1
        best = board.ceiling + 1
        certify = (
            board.problem.capacity is None
            and self._steps % 2 == 0
            and board.best is not None
            and best <= LARGEST_OFFSET
        )
        ceiling = best if certify else board.goal
        model, offsets, height = build_model(
            cp_model,
            problem,
            ceiling,
            floor=board.bound // problem.unit if certify else None,
        )
        if certify and board.best is not None:
            for variable, at in zip(offsets, board.best.offsets, strict=True):
                model.add_hint(variable, at // problem.unit)
            model.add_hint(height, best)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = (self.seed + self._steps) % 2**31
        solver.parameters.catch_sigint_signal = False
        solver.parameters.max_time_in_seconds = max(0.01, min(seconds, board.seconds_left))
        if self.deterministic:
            solver.parameters.max_deterministic_time = nodes / 60_000
        status = _solve(solver, model, board)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            kind = "certification" if certify else "feasibility"
            board.offer([int(solver.value(v)) for v in offsets], f"{NAME} ({kind})")
        if certify and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            # The bound is a float: exact well beyond the sizes that LARGEST_OFFSET lets in here.
            value = solver.best_objective_bound
            if math.isfinite(value) and value < 2**52:
                board.prove(math.ceil(value - 1e-6), NAME)
        elif status == cp_model.INFEASIBLE:
            board.prove(ceiling + 1, NAME)
        return True


def build_model(
    cp_model: Any, problem: Reduced, ceiling: int, *, floor: int | None
) -> tuple[Any, list[Any], Any]:
    """(model, offset variables, height): rectangles of life times size below the ceiling.

    With a floor the height is a variable, at least the floor, to be minimised.
    """
    model = cp_model.CpModel()
    offsets, across, up = [], [], []
    for k, (a, b, size) in enumerate(zip(problem.lower, problem.upper, problem.size, strict=True)):
        offset = model.new_int_var(0, ceiling - size, f"offset{k}")
        offsets.append(offset)
        across.append(model.new_fixed_size_interval_var(a, b - a, f"life{k}"))
        up.append(model.new_fixed_size_interval_var(offset, size, f"bytes{k}"))
    model.add_no_overlap_2d(across, up)
    if floor is None:
        return model, offsets, None
    height = model.new_int_var(floor, ceiling, "height")
    for offset, size in zip(offsets, problem.size, strict=True):
        model.add(offset + size <= height)
    model.minimize(height)
    return model, offsets, height


def _solve(solver: Any, model: Any, board: Board) -> Any:
    """Solves in this thread; another one calls it off when the portfolio is done."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.05):
            if not board.going():
                solver.stop_search()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return solver.solve(model)
    finally:
        finished.set()
        watcher.join()
