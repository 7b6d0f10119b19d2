"""The arms of the portfolio besides hot first and CP-SAT: each works in steps of limited size.

A step gets seconds and nodes, whichever ends first; deterministic runs get nodes alone. It returns
False when the arm has nothing more to try.
"""

from __future__ import annotations

import random

from . import native
from .board import Board
from .canonical import UNLIMITED, Outcome, Search, SearchResult, search_reference
from .greedy import Greedy, orders

# A layout within this share of the bound is worth more search at the bound than nearer targets.
CLOSE = 5e-4
# The reference search takes three Python frames a buffer and is slow: larger problems are left to
# the other arms.
REFERENCE_BUFFERS = 300
SKYLINE_BUFFERS = 12000


class GreedyArm:
    """All orders, first and best fit, and the skyline; one step does them all."""

    name = "greedy"

    def __init__(self, board: Board) -> None:
        self.board = board

    def step(self, seconds: float, nodes: int) -> bool:
        board = self.board
        greedy = Greedy(board.reduced, board.stop)
        for name, order in orders(board.reduced):
            for best_fit in (False, True):
                if not board.going():
                    return False
                fit = "best fit" if best_fit else "first fit"
                layout = greedy.place(order, best_fit=best_fit, ceiling=board.ceiling)
                board.offer(layout, f"greedy ({name}, {fit})")
        if board.going() and board.reduced.count <= SKYLINE_BUFFERS:
            board.offer(greedy.skyline(ceiling=board.ceiling), "greedy (skyline)")
        return False


class SqueakyArm:
    """Greedy again and again: buffers that ended above the goal go to the front next time."""

    name = "squeaky wheel"

    def __init__(self, board: Board, seed: int) -> None:
        self.board = board
        self._greedy = Greedy(board.reduced, board.stop)
        self._random = random.Random(seed)
        self._orders: list[list[int]] = []
        self._turn = 0
        self._rank: list[float] = []
        self._since = 0
        self._least = UNLIMITED

    def _restart(self) -> None:
        order = self._orders[self._turn % len(self._orders)]
        self._turn += 1
        self._rank = [0.0] * len(order)
        for position, i in enumerate(order):
            self._rank[i] = position
        self._since = 0
        self._least = UNLIMITED

    def step(self, seconds: float, nodes: int) -> bool:
        board, problem = self.board, self.board.reduced
        end = board.seconds_left - seconds
        if not self._orders:
            self._orders = [order for _, order in orders(problem)]
            self._restart()
        passes = max(1, nodes // problem.count)
        for _ in range(passes):
            if not board.going() or board.seconds_left < end:
                break
            rank = self._rank
            order = sorted(range(problem.count), key=rank.__getitem__)
            layout = self._greedy.place(order, best_fit=self._random.random() < 0.3)
            if layout is None:
                break
            board.offer(layout, self.name)
            goal = board.goal
            peak = max(at + size for at, size in zip(layout, problem.size, strict=True))
            self._since = 0 if peak < self._least else self._since + 1
            self._least = min(self._least, peak)
            if self._since > 60:
                self._restart()
                continue
            step = problem.count * self._random.uniform(0.02, 0.4)
            for i, at in enumerate(layout):
                if at + problem.size[i] > goal:
                    rank[i] -= step * self._random.uniform(0.5, 1.5)
        return True


class CanonicalArm:
    """The canonical search at the goal; without a capacity also at targets above it, so that the
    peak comes down while the bound can't be reached, and so that proofs raise the bound."""

    name = "canonical search"

    def __init__(self, board: Board, seed: int) -> None:
        self.board = board
        self.seed = seed
        self._at_goal: Search | None = None
        self._target = -1
        self._steps = 0

    def step(self, seconds: float, nodes: int) -> bool:
        if native.library() is None and self.board.reduced.count > REFERENCE_BUFFERS:
            return False
        self._steps += 1
        while self.board.going():
            if self._run_at_goal(seconds, nodes).outcome is Outcome.ABORTED:
                break
        if self.board.problem.capacity is None and self._steps > 1:
            self._come_down(seconds, nodes)
        return True

    def _run_at_goal(self, seconds: float, nodes: int) -> SearchResult:
        goal = self.board.goal
        if native.library() is None:
            result = search_reference(
                self.board.reduced, goal, nodes=nodes, seconds=seconds, stop=self.board.stop
            )
        else:
            if self._at_goal is None or self._target != goal:
                self.close()
                self._at_goal = Search(self.board.reduced, goal, seed=self.seed)
                self._target = goal
            result = self._at_goal.run(nodes=nodes, seconds=seconds, stop=self.board.stop)
        self._report(result, goal)
        return result

    def _report(self, result: SearchResult, target: int) -> None:
        if result.outcome is Outcome.FOUND:
            self.board.offer(result.offsets, f"{self.name} ({result.order})")
        elif result.outcome is Outcome.INFEASIBLE:
            self.board.prove(target + 1, self.name)

    def _come_down(self, seconds: float, nodes: int) -> None:
        """Bisects between bound and peak, a part of the budget each."""
        board = self.board
        hopeless = board.goal
        for _ in range(8):
            best = board.ceiling + 1
            low = max(board.goal, hopeless)
            if not board.going() or best - low <= max(1, int(best * CLOSE)):
                return
            target = (low + best) // 2
            result = self._fresh(target, seconds / 4, nodes // 4)
            self._report(result, target)
            if result.outcome is Outcome.ABORTED:
                hopeless = target

    def _fresh(self, target: int, seconds: float, nodes: int) -> SearchResult:
        problem, stop = self.board.reduced, self.board.stop
        if native.library() is None:
            return search_reference(problem, target, nodes=nodes, seconds=seconds, stop=stop)
        with Search(problem, target, seed=self.seed) as search:
            return search.run(nodes=nodes, seconds=seconds, stop=stop)

    def close(self) -> None:
        if self._at_goal is not None:
            self._at_goal.close()
            self._at_goal = None
