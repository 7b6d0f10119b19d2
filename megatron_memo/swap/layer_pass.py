"""One layer's forward and backward of one micro-batch, step by step.

NOTE: steps
-----------
A step is what a layer does between two ends of a step in forward: a chunk's half of the layer, or
the attention. Steps are counted up in forward; backward walks them down and says which one it
begins (the layer's `on_gradient` callbacks do). A step that puts nothing counts as well: the time
that it takes is time for other steps' copies.

What a step put is given up when `depth` more steps have ended, or when the second layer after it
begins, if depth is None (the paper's two rounding buffers). Backward that begins a step has what
the next `depth` steps read first brought back, through the layers below; or all of its layer and
of the one below when it begins a layer. What only later steps of the forward read is let go.

Autograd runs a layer's steps in this order because it takes the node that was made last of those
that are ready. Were it to take another one, a group would be fetched again, later than it could
have been: slower, never wrong.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_memo.swap.context import LayerContext
from megatron_memo.swap.group import Group

if TYPE_CHECKING:
    from megatron_memo.swap.engine import SwapEngine

Depth = int | None  # steps; None for layers


@dataclass
class Portion:
    """What is given up at once in forward.

    Attributes:
        owner: number of the pass that made it.
        step: the pass's step; None for a whole layer.
        context: whose groups; None if the layer keeps what it saves.
        groups: of the step; None for all that the context has when it is given up.
    """

    owner: int
    step: int | None
    context: LayerContext | None
    groups: list[Group] | None

    def retire(self) -> None:
        if self.context is not None:
            self.context.retire(self.groups)


class LayerPass:
    """One layer's forward and backward of one micro-batch, as the engine sees it.

    Attributes:
        number: no two passes of an engine have the same.
        own: the layer's context; None if the layer does not swap.
        below: the pass of the layer before it, until this one's backward has ended.
        depth: see the NOTE.
        steps: ended in forward.
    """

    def __init__(
        self,
        engine: "SwapEngine",
        number: int,
        own: LayerContext | None,
        below: "LayerPass | None",
        depth: Depth,
    ):
        self._engine = engine
        self.number = number
        self.own = own
        self.below = below
        self.depth = depth
        self.steps = 0
        self._groups = 0  # ended in forward, likewise
        self._at: int | None = None  # the step that backward is in

    def end_step(self) -> None:
        """What was put since the last step leaves; a step of the forward is over."""
        groups: list[Group] = []
        if self.own is not None:
            self.own.flush()
            groups = self.own.groups(since=self._groups)
            self._groups += len(groups)
        step, self.steps = self.steps, self.steps + 1
        if self.own is not None:
            self.own.step = self.steps
        if self.depth is not None:
            portion = Portion(self.number, step, self.own, groups)
            self._engine.step_has_ended(portion, self.depth)

    def begin_backward(self) -> None:
        """The gradient of the layer's output has come."""
        if self.depth is not None:
            self._fetch_from(self.steps - 1, self.depth)
            return
        self._engine.take_turn(self.number)
        below = self.below
        while below is not None and below.own is None:
            below = below.below
        for one in (self, below):
            if one is not None and one.own is not None:
                one.own.prefetch()

    def begin_backward_step(self, step: int) -> None:
        """Backward is through with the steps after `step` and begins it. May be told twice."""
        if step == self._at:
            return
        self._at = step
        if self.own is not None:
            self.own.let_go_before(step)
        if self.depth is not None:
            self._engine.take_turn(self.number, step)
            self._fetch_from(step, self.depth)

    def end_backward(self) -> None:
        """The gradient of the layer's input is complete."""
        self._engine.leave(self.number)
        if self.own is not None:
            self.own.release()
        self.below = None

    def _fetch_from(self, step: int, depth: int) -> None:
        """Brings back what is read first in `step` and in the `depth` steps that follow it."""
        one: LayerPass | None = self
        left = depth + 1
        while one is not None and left > 0:
            for at in range(step, max(step - left, -1), -1):
                if one.own is not None:
                    one.own.fetch_first_read_in(at)
            left -= step + 1
            one = one.below
            step = one.steps - 1 if one is not None else -1
