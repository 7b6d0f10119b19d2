"""Two levels: first the buffers within each kind of pass, then those that cross passes.

Level 1 lays out the buffers that are born and die within one pass, once for all passes of the same
shape, whatever the depth of the model; answers are kept for later calls in the same process. Level
2 puts them down in every pass, at the bottom of memory or hanging from the bound, and lays the
crossing buffers around them: what a pass keeps free at a moment is used, as a staircase, not only
what is free above its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .arms import CanonicalArm, GreedyArm
from .board import Board
from .greedy import Greedy, orders
from .passes import Pass
from .problem import Buffer, Problem

NAME = "bi-level"
# Search for the best layout of one shape: seconds, of all shapes together: share of a step.
SHAPE_SECONDS = 0.5

Shape = tuple[tuple[int, int, int], ...]
_answers: dict[Shape, tuple[int, ...]] = {}
REMEMBERED = 2000


class BiLevel:
    """An arm: the first step does level 1 and every order of level 2, there is no second."""

    name = NAME

    def __init__(self, board: Board, passes: Sequence[Pass], seed: int) -> None:
        self.board = board
        self.passes = passes
        self.seed = seed

    def step(self, seconds: float, nodes: int) -> bool:
        board, problem = self.board, self.board.reduced
        answers = self._level_one(seconds, nodes)
        fixed = [-1] * problem.count
        for one in self.passes:
            for k, at in zip(one.inner, answers[one.shape], strict=True):
                fixed[k] = at // problem.unit
        greedy = Greedy(problem, board.stop)
        for how, base in self._bases(fixed):
            crossing = [k for k, at in enumerate(base) if at < 0]
            if not crossing:
                board.offer(base, f"{NAME} ({how})")
                continue
            for name, order in orders(problem.subset(crossing)):
                for best_fit in (False, True):
                    if not board.going():
                        return False
                    layout = greedy.place(
                        [crossing[i] for i in order],
                        best_fit=best_fit,
                        ceiling=board.ceiling,
                        fixed=base,
                    )
                    fit = "best fit" if best_fit else "first fit"
                    board.offer(layout, f"{NAME} ({how}; {name}, {fit})")
        return False

    def _bases(self, fixed: list[int]) -> Iterator[tuple[str, list[int]]]:
        """Where passes lie: at the bottom, or hanging from the bound."""
        yield "passes at the bottom", fixed
        size = self.board.reduced.size
        top = self.board.bound // self.board.reduced.unit
        hanging = [at if at < 0 else top - at - size[k] for k, at in enumerate(fixed)]
        if all(at >= 0 for k, at in enumerate(hanging) if fixed[k] >= 0):
            yield "passes at the top", hanging

    def _level_one(self, seconds: float, nodes: int) -> dict[Shape, tuple[int, ...]]:
        """Offsets of every shape, in real bytes; the shapes that need most get most care."""
        board = self.board
        shapes = {one.shape for one in self.passes}
        answers = {shape: _answers[shape] for shape in shapes if shape in _answers}
        answers[()] = ()
        end = board.seconds_left - seconds
        for shape in sorted(shapes - answers.keys(), key=_weight, reverse=True):
            inner = Board(
                Problem(tuple(Buffer(str(k), *each) for k, each in enumerate(shape))), 10 * seconds
            )
            GreedyArm(inner).step(seconds, nodes)
            arm = CanonicalArm(inner, self.seed)
            if inner.going() and board.going() and board.seconds_left > end:
                arm.step(min(seconds, SHAPE_SECONDS), nodes)
            arm.close()
            inner.halt()
            assert inner.best is not None
            answers[shape] = inner.best.offsets
            if inner.best.peak == inner.bound and len(_answers) < REMEMBERED:
                _answers[shape] = inner.best.offsets
        return answers


def _weight(shape: Shape) -> tuple[int, Shape]:
    return sum(size * (upper - lower) for lower, upper, size in shape), shape
