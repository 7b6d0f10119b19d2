"""What a decision costs: the seconds of a step and the bytes in each memory.

Forward of a layer lasts as long as the longest of
    its compute,
    its bytes over the link, which the compute of as many layers as the buffers hold can hide,
    attention plus those bytes that do not fit into the buffers: while attention runs nothing new
        is flushed, so at most what the buffers hold moves behind it, and the rest has to move
        behind (or beside) the token-wise work,
    its bytes to the disk.
Backward likewise, with the recomputation of rows that were not swapped as part of its compute. Only
steady layers are counted: filling and draining takes one layer's copy at each end of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Depth, Problem


@dataclass(frozen=True)
class Decision:
    """What is chosen.

    Attributes:
        rows: whose activations are swapped; the others are recomputed.
        spilled: bytes of each layer's swapped ones, of any row, that go on from host memory to
            the disk.
        depth: of the buffers.
    """

    rows: int
    spilled: float
    depth: Depth


@dataclass(frozen=True)
class Cost:
    """Seconds of one layer and of the step; bytes of the rank."""

    forward: float
    backward: float
    exposed_forward: float
    exposed_backward: float
    step: float
    host: float
    disk: float
    device: float


def cost(problem: Problem, chosen: Decision) -> Cost:
    """What `chosen` costs, whether it fits or not."""
    alpha = chosen.rows / problem.rows
    moved = problem.always + problem.others * alpha
    in_buffers = chosen.depth.layers(problem.groups(chosen.rows))
    unbuffered = max(1.0 - in_buffers, 0.0)
    disk = problem.disk

    compute = problem.forward.total
    out = moved * problem.link.seconds_out(problem.both_share)
    forward = max(
        compute,
        out,
        problem.forward.attention + out * unbuffered,
        chosen.spilled / disk.write if disk is not None else 0.0,
    )
    again = problem.backward.total + problem.recompute * (1 - alpha)
    back = moved * problem.link.seconds_in(problem.both_share)
    backward = max(
        again,
        back,
        problem.backward.attention + back * unbuffered,
        chosen.spilled / disk.read if disk is not None else 0.0,
    )
    resident = problem.layers - problem.swapping
    a_pass = problem.swapping * (forward + backward)
    a_pass += resident * (problem.forward.total + problem.backward.total)
    swapped_layers = problem.passes * problem.swapping
    return Cost(
        forward=forward,
        backward=backward,
        exposed_forward=swapped_layers * (forward - compute),
        exposed_backward=swapped_layers * (backward - again),
        step=problem.passes * a_pass + problem.other_seconds,
        host=problem.most_held * (moved - chosen.spilled),
        disk=problem.most_held * chosen.spilled,
        device=in_buffers * moved,
    )
