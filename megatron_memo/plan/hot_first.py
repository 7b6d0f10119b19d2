"""Hot first: for thousands of buffers, of which few decide the peak.

The buffers that touch a clique with nearly the highest load are laid out at the goal by the
canonical search; the others then fall into the gaps, first fit by decreasing size. Where some don't
fit, the cliques they touch count as hot from then on and it starts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .board import Board
from .canonical import UNLIMITED, Outcome, Search
from .greedy import Greedy

# Peaks of training are spikes: the first is often enough, and takes a moment.
THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.65, 0.5)
REPAIRS = 6
NAME = "hot first"


class HotFirst:
    """An arm: `step` tries one hot set; False when there is nothing left to try."""

    name = NAME

    def __init__(self, board: Board, seed: int) -> None:
        self.board = board
        self.seed = seed
        self._greedy = Greedy(board.reduced, board.stop)
        self._loads = board.reduced.loads()
        self._tries = self._hot_sets()

    def _hot_sets(self) -> Iterator[tuple[float, list[bool]]]:
        top = max(self._loads)
        for threshold in THRESHOLDS:
            hot = [load >= threshold * top for load in self._loads]
            for _ in range(REPAIRS):
                yield threshold, hot
                if not self._spilled:
                    break  # no layout of the hot set, or nothing to learn from
                for i in self._spilled:
                    for t in range(self.board.reduced.lower[i], self.board.reduced.upper[i]):
                        hot[t] = True

    def step(self, seconds: float, nodes: int) -> bool:
        self._spilled: list[int] = []
        attempt = next(self._tries, None)
        if attempt is None:
            return False
        threshold, hot = attempt
        problem = self.board.reduced
        chosen = touching(problem.lower, problem.upper, hot)
        if len(chosen) == problem.count:
            return True  # that is the canonical search itself
        goal = self.board.goal
        part = problem.subset(chosen)
        with Search(part, goal // part.unit, seed=self.seed) as search:
            result = search.run(nodes=nodes, seconds=seconds, stop=self.board.stop)
        if result.outcome is Outcome.INFEASIBLE:
            self.board.prove(goal + 1, NAME)
        if result.offsets is None:
            return True
        fixed = [-1] * problem.count
        for i, at in zip(chosen, result.offsets, strict=True):
            fixed[i] = at * part.unit
        self._complete(fixed, goal, f"{NAME} ({threshold:.0%} of the load, {result.order})")
        return True

    def _complete(self, fixed: Sequence[int], goal: int, by: str) -> None:
        problem = self.board.reduced
        size, life = problem.size, problem.life
        rest = [i for i in range(problem.count) if fixed[i] < 0]
        loose: list[int] | None = None
        for key in (
            lambda i: (-size[i], -life[i]),
            lambda i: (-life[i], -size[i]),
            lambda i: (-size[i] * life[i],),
        ):
            order = sorted(rest, key=key)
            for best_fit in (False, True):
                offsets = self._greedy.place(order, best_fit=best_fit, ceiling=goal, fixed=fixed)
                if offsets is not None:
                    self.board.offer(offsets, by)
                    return
            if loose is None:
                loose = self._greedy.place(order, fixed=fixed, ceiling=UNLIMITED)
        if loose is not None:
            self.board.offer(loose, by)
            self._spilled = [i for i in rest if loose[i] + size[i] > goal]


def touching(lower: Sequence[int], upper: Sequence[int], hot: Sequence[bool]) -> list[int]:
    """Buffers with a hot clique in their span."""
    before = [0]
    for is_hot in hot:
        before.append(before[-1] + is_hot)
    return [i for i, (a, b) in enumerate(zip(lower, upper, strict=True)) if before[b] > before[a]]
