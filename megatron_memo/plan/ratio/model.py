"""The cheapest decision, by CP-SAT over integers.

NOTE: resolution. Rows are exact. Seconds are whole multiples of 2^-30 of the longest pass that any
decision can give. Bytes are exact while all that could be held, times the rows, is below 2^57
(1 TiB at 131072 rows), and else multiples of the smallest power of two that keeps it there; what
goes to the disk is cut in 2^20 slices of a layer's bytes, or in bytes where those are fewer. Needs
are rounded up and limits down, so that what is chosen truly fits. Inequalities are multiplied by
the number of rows instead of dividing by it, so that a rounding counts once and not once a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cost import Decision
from .problem import Depth, Problem

_TIME_BITS, _BYTE_BITS, _MOST_ROWS = 30, 57, 1 << 24
_SLICES = 1 << 20
# In CP-SAT's deterministic seconds; problems seen take less than a tenth of one. What is best until
# then is taken.
_PATIENCE = 2.0


@dataclass(frozen=True)
class _Units:
    """Seconds and bytes as the integers of the model."""

    second: float
    byte: float
    enough: int  # of bytes, for anything that can be held

    @classmethod
    def of(cls, problem: Problem) -> _Units:
        moved = problem.always + problem.others
        slowest = max(problem.link.seconds_out(problem.both_share), _in(problem))
        if problem.disk is not None:
            slowest = max(slowest, 1 / problem.disk.write, 1 / problem.disk.read)
        longest = max(problem.forward.total, problem.backward.total + problem.recompute)
        longest += moved * slowest
        held_layers = max(problem.most_held, 2)
        held = held_layers * moved
        byte = 2.0 ** max((held * problem.rows).bit_length() - _BYTE_BITS, 0)
        # Above what is held, for each of its summands is rounded up.
        return cls(longest / 2**_TIME_BITS or 1.0, byte, math.ceil(held / byte) + 4 * held_layers)

    def seconds(self, value: float) -> int:
        return math.ceil(value / self.second)

    def need(self, nbytes: float) -> int:
        return math.ceil(nbytes / self.byte)

    def limit(self, nbytes: float) -> int:
        return min(math.floor(nbytes / self.byte), self.enough)


def cheapest(problem: Problem) -> Decision | None:
    """The decision with the shortest step; of equal ones that with the smallest buffers, then the
    fewest swapped rows. None if nothing fits.

    Raises:
        ValueError: more rows than the integers allow.
    """
    if problem.rows > _MOST_ROWS:
        raise ValueError(f"{problem.rows} rows: the solver takes at most {_MOST_ROWS}")
    from ortools.sat.python import cp_model

    units, rows = _Units.of(problem), problem.rows
    model = cp_model.CpModel()
    swapped = model.new_int_var(0, rows, "rows swapped")
    always, others = units.need(problem.always), units.need(problem.others)
    # What goes to the disk, in slices of whole units.
    slice_units = -(-(always + others) // _SLICES) or 1
    most = -(-(always + others) // slice_units) if problem.disk is not None else 0
    slices = model.new_int_var(0, most, "slices to disk")
    spilled = slice_units * slices

    horizon = 2 ** (_TIME_BITS + 2)
    forward = model.new_int_var(0, horizon, "forward")
    backward = model.new_int_var(0, horizon, "backward")
    out, back = problem.link.seconds_out(problem.both_share), _in(problem)

    def takes(seconds, fixed: float, per_all_rows: float, of_rows, only_if=()) -> None:
        """seconds >= fixed + per_all_rows * of_rows / rows"""
        bound = rows * units.seconds(fixed) + units.seconds(per_all_rows) * of_rows
        model.add(rows * seconds >= bound).only_enforce_if(*only_if)

    takes(forward, problem.forward.total, 0, swapped)
    takes(forward, problem.always * out, problem.others * out, swapped)
    takes(backward, problem.backward.total, problem.recompute, rows - swapped)
    takes(backward, problem.always * back, problem.others * back, swapped)

    moved, held = always * rows + others * swapped, problem.most_held  # moved: times rows
    model.add(rows * spilled <= moved + rows * slice_units)
    model.add(held * (moved - rows * spilled) <= rows * units.limit(problem.host))
    if problem.disk is not None:
        model.add(held * spilled <= units.limit(problem.disk.nbytes))
        for seconds, speed in ((forward, problem.disk.write), (backward, problem.disk.read)):
            one_slice = slice_units * units.byte / speed / units.second
            model.add(_SLICES * seconds >= math.ceil(one_slice * _SLICES) * slices)

    modes = _modes(problem)
    literals = [model.new_bool_var(f"depth {mode.depth}, {mode.side}") for mode in modes]
    model.add_exactly_one(literals)
    for mode, literal in zip(modes, literals, strict=True):
        model.add(swapped >= mode.least_rows).only_enforce_if(literal)
        model.add(swapped <= mode.most_rows).only_enforce_if(literal)
        for seconds, attention, byte in (
            (forward, problem.forward.attention, out),
            (backward, problem.backward.attention, back),
        ):
            behind = byte * max(1.0 - mode.in_buffers, 0.0)
            takes(
                seconds,
                attention + problem.always * behind,
                problem.others * behind,
                swapped,
                (literal,),
            )
        if problem.device is not None:
            buffers = rows * units.need(problem.always * mode.in_buffers)
            buffers += units.need(problem.others * mode.in_buffers) * swapped
            model.add(buffers <= rows * units.limit(problem.device)).only_enforce_if(literal)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    # The relaxation of everything: coefficients are large, and without it bounds creep.
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = _PATIENCE
    model.minimize(forward + backward)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    solved = (cp_model.OPTIMAL, cp_model.FEASIBLE)
    assert status in solved, solver.status_name(status)
    best = solver.value(forward) + solver.value(backward)
    # Buffers differ by mode and hardly by rows. What need not spill does not, see below.
    model.add(forward + backward <= best)
    order = sorted({mode.in_buffers for mode in modes})
    buffers = sum(
        order.index(mode.in_buffers) * literal
        for mode, literal in zip(modes, literals, strict=True)
    )
    model.minimize(buffers * (rows + 1) + swapped)
    status = solver.solve(model)
    assert status in solved, solver.status_name(status)
    depth = next(
        mode.depth
        for mode, literal in zip(modes, literals, strict=True)
        if solver.boolean_value(literal)
    )
    return _decision(problem, solver.value(swapped), depth)


def _decision(problem: Problem, rows: int, depth: Depth) -> Decision:
    """With what has to spill, and no more."""
    moved = problem.always + problem.others * rows / problem.rows
    room = problem.host / problem.most_held if problem.most_held else math.inf
    return Decision(rows, max(moved - room, 0.0) if problem.disk is not None else 0.0, depth)


@dataclass(frozen=True)
class _Mode:
    """A depth, and whether the layer's chunks are of one kind: that decides its groups."""

    depth: Depth
    side: str
    least_rows: int
    most_rows: int
    in_buffers: float


def _modes(problem: Problem) -> list[_Mode]:
    rows = problem.rows
    sides = [("all recomputed", 0, 0), ("all swapped", rows, rows)]
    if rows > 1:
        sides.append(("both", 1, rows - 1))
    return [
        _Mode(depth, side, least, most, depth.layers(problem.groups(least)))
        for depth in problem.depths
        for side, least, most in sides
    ]


def _in(problem: Problem) -> float:
    return problem.link.seconds_in(problem.both_share)
