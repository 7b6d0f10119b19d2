"""Advance: pass after pass in the order of time, each laid out at the goal around what lies there.

A window of a few passes is laid out by the canonical search, with what lives on from before pinned
where it is; the first of these passes are kept and the window moves on. Where a window finds no
layout the search steps back and goes on from there another way; where that does not help either,
the ceiling rises a little.

Equal layers are not searched again and again: where a run of alike passes has settled, so that what
crosses the boundary between two passes has its counterpart p passes later, it is made to lie at the
same place every p passes (`_Lock`). The stretches between are problems of their own then, and equal
ones have the same answer, whatever the depth of the model.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import native
from .board import Board
from .canonical import Outcome, Search
from .greedy import Greedy
from .hot_first import touching
from .passes import Pass
from .reduced import Reduced, reduce_problem

NAME = "advance"
# (passes looked at, passes kept of them), in the order in which they are tried.
VIEWS = ((3, 1), (5, 2), (2, 1))
PERIODS = (1, 2, 3, 4)
# Search for one window in the first try: units of work. GROWTH times more in each following one.
WINDOW_NODES = 8_000
GROWTH = 3
STEPS_BACK = (1, 2, 4)
# By this share of the goal the ceiling rises where nothing helped.
RISE = 0.002
# Passes before a lock that are laid out together with its beginning.
LEAD = 3
# Shares of the ceiling: buffers at moments with at least that load are laid out first.
THRESHOLDS = (0.97, 0.9, 0.0)
LARGEST_GROUPS = 4
# Part of the units of work with which every place of the crossing buffers is tried first.
SHORT = 8


# Offsets by buffer.
Places = Sequence[int] | Mapping[int, int]


@dataclass(frozen=True)
class _Window:
    """Buffers of some passes, and pins: what lives on from before, merged where it touches."""

    members: tuple[int, ...]
    part: Reduced
    pins: list[int]  # by buffer of the part, members first; -1: to be placed

    def key(self) -> tuple[object, ...]:
        part = self.part
        return tuple(part.lower), tuple(part.upper), tuple(part.size), tuple(self.pins)


@dataclass(frozen=True)
class _Lock:
    """Stretches of `period` passes from `begin` on, one for each two neighbours in `crossings`:
    these hold what crosses a boundary, counterparts at equal places of the tuples."""

    begin: int
    period: int
    crossings: tuple[tuple[int, ...], ...]


class Advance:
    """An arm: each step is one run through the iteration, with another view and longer searches."""

    name = NAME

    def __init__(self, board: Board, passes: Sequence[Pass], seed: int) -> None:
        self.board = board
        self.passes = passes
        self.seed = seed
        self._tries = 0
        self._end = 0.0  # what is left of the board's time when a step is over
        self._far: dict[int, int] = {}
        self._favourite: dict[int, list[tuple[int, int]]] = {}
        self._known: dict[tuple[object, ...], list[int]] = {}
        problem = board.reduced
        self._pass_of = [0] * problem.count
        self._place_in_pass = [0] * problem.count
        for q, one in enumerate(passes):
            for place, k in enumerate(one.buffers):
                self._pass_of[k] = q
                self._place_in_pass[k] = place
        self._begins = [problem.lower[one.buffers[0]] for one in passes]
        self._crossing = self._all_crossing()
        self._locks = {
            period: [lock for run in self._alike() if (lock := self._lock(*run, period))]
            for period in PERIODS
        }

    def step(self, seconds: float, nodes: int) -> bool:
        if native.library() is None:
            return False
        look, keep = VIEWS[self._tries % len(VIEWS)]
        self._end = self.board.seconds_left - seconds
        layout = self._run(look, keep, WINDOW_NODES * GROWTH**self._tries)
        if layout is None and not self._going():
            return True  # the next step gets as far at once: windows are remembered
        self._tries += 1
        if layout is not None:
            self.board.offer(layout, f"{NAME} ({look} passes at a time)")
        return True

    def _going(self) -> bool:
        return self.board.going() and self.board.seconds_left > self._end

    # ---- structure

    def _all_crossing(self) -> list[tuple[int, ...]]:
        """What lives across the beginning of each pass."""
        problem = self.board.reduced
        crossing: list[list[int]] = [[] for _ in self.passes]
        for k in range(problem.count):
            first = self._pass_of[k] + 1
            last = bisect_left(self._begins, problem.upper[k])
            for q in range(first, last):
                crossing[q].append(k)
        return [tuple(each) for each in crossing]

    def _alike(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of passes of one family that follow one another."""
        begin = 0
        for _, group in itertools.groupby(self.passes, key=lambda one: one.family):
            length = len(list(group))
            if length > 2:
                yield begin, begin + length
            begin += length

    def _lock(self, begin: int, end: int, period: int) -> _Lock | None:
        """From the first boundary of a run of alike passes on at which it has settled."""
        for at in range(begin + 1, end - 2 * period + 1):
            crossings = [self._crossing[at]]
            for later in range(at + period, end + 1, period):
                image = self._image(crossings[-1], later - period, begin, period)
                if image is None:
                    break
                crossings.append(image)
            if len(crossings) > 2:
                return _Lock(at, period, tuple(crossings))
        return None

    def _image(
        self, crossing: Sequence[int], at: int, begin: int, period: int
    ) -> tuple[int, ...] | None:
        """Counterparts, `period` passes later, of what crosses the beginning of pass `at`: those
        of older buffers are themselves. None where they are not what crosses there."""
        if at + period >= len(self.passes):
            return None
        size = self.board.reduced.size
        image = []
        for k in crossing:
            q = self._pass_of[k]
            same = k
            if q >= begin:
                same = self.passes[q + period].buffers[self._place_in_pass[k]]
            if size[same] != size[k]:
                return None
            image.append(same)
        return tuple(image) if sorted(image) == list(self._crossing[at + period]) else None

    # ---- one run

    def _run(self, look: int, keep: int, nodes: int) -> list[int] | None:
        """Offsets of all buffers, or None when called off."""
        board = self.board
        offsets = [-1] * board.reduced.count
        goal = ceiling = board.goal
        self._far = self._place_far(goal)
        locks = {lock.begin: lock for period in PERIODS for lock in self._locks[period]}
        starts = sorted(locks)
        at = furthest = backs = 0
        seed = self.seed
        while at < len(self.passes):
            if not self._going():
                return None
            ahead = next((b for b in starts if b > at), None)
            if ahead is not None and ahead - at <= LEAD:
                done = self._locked(at, ahead, offsets, ceiling, seed, nodes)
                if done is not None:
                    at = done
                    continue
                starts = [b for b in starts if b > ahead]
            last = at + look if ahead is None or ahead - LEAD <= at else ahead
            window = self._window(at, max(at + 1, min(at + look, last)), offsets, {})
            found = self._lay_out(window, ceiling, seed, nodes)
            if found is None:
                if at > furthest:
                    furthest, backs = at, 0
                if backs < len(STEPS_BACK):
                    target = max(0, at - STEPS_BACK[backs] * keep)
                    backs += 1
                    seed += 1
                else:
                    target, backs = at, 0
                    ceiling += max(1, int(goal * RISE))
                    if ceiling > board.ceiling:
                        return None
                self._forget(target, at, offsets)
                at = target
                continue
            for one in self.passes[at : at + keep]:
                for k in one.buffers:
                    offsets[k] = found[k]
            at += keep
        return offsets

    def _forget(self, begin: int, end: int, offsets: list[int]) -> None:
        for one in self.passes[begin:end]:
            for k in one.buffers:
                offsets[k] = -1

    def _locked(
        self, at: int, begin: int, offsets: list[int], ceiling: int, seed: int, nodes: int
    ) -> int | None:
        """Lays out the passes from `at` on through the stretches of a lock that begins at
        `begin`; the pass after them, or None when no lock was found. What worked for passes of
        this family before is tried first; short searches come before long ones."""
        choices = [
            (period, turn, lock, state)
            for period in PERIODS
            for lock in self._locks[period]
            if lock.begin == begin
            for turn, state in enumerate(self._states(lock, at, offsets, ceiling))
            if self._may_repeat(lock, state)
        ]
        family = self.passes[begin].family
        liked = self._favourite.setdefault(family, [])
        choices.sort(key=lambda each: each[:2] not in liked)
        for budget in (nodes // SHORT, nodes):
            for period, turn, lock, state in choices:
                if not self._going():
                    return None
                done = self._repeat(lock, state, at, offsets, ceiling, seed, budget)
                if done > 1:
                    liked.insert(0, (period, turn))
                    return lock.begin + lock.period * done
        return None

    def _may_repeat(self, lock: _Lock, state: Sequence[int]) -> bool:
        """False where what crosses one boundary lies on what crosses the next while both live."""
        problem = self.board.reduced
        here, there = lock.crossings[:2]
        return not any(
            first != second
            and problem.upper[first] > problem.lower[second]
            and a < b + problem.size[second]
            and b < a + problem.size[first]
            for first, a in zip(here, state, strict=True)
            for second, b in zip(there, state, strict=True)
        )

    def _place_far(self, goal: int) -> dict[int, int]:
        """What crosses whole locks is stacked at the top from the start, out of the way."""
        problem = self.board.reduced
        far = sorted(
            {
                k
                for locks in self._locks.values()
                for lock in locks
                for k in lock.crossings[0]
                if k in lock.crossings[-1]
            },
            key=lambda k: (-problem.life[k], k),
        )
        if not far:
            return {}
        fixed = Greedy(problem, self.board.stop).place(far)
        if fixed is None:
            return {}
        return {k: goal - fixed[k] - problem.size[k] for k in far}

    def _repeat(
        self,
        lock: _Lock,
        state: Sequence[int],
        at: int,
        offsets: list[int],
        ceiling: int,
        seed: int,
        nodes: int,
    ) -> int:
        """Tries one place for what crosses the boundaries; the number of stretches that could be
        laid out, whose offsets are filled in if there are two or more."""
        done: list[dict[int, int]] = []
        held: dict[int, int] = {}
        for turn, (here, there) in enumerate(itertools.pairwise(lock.crossings)):
            held.update(zip(here, state, strict=True))
            start = lock.begin + turn * lock.period
            ends = dict(zip(there, state, strict=True))
            window = self._window(start, start + lock.period, held, ends)
            found = self._lay_out(window, ceiling, seed, nodes)
            if found is None:
                break
            done.append(found)
        if len(done) < 2:
            return 0
        lead = self._window(
            at, lock.begin, offsets, dict(zip(lock.crossings[0], state, strict=True))
        )
        before = self._lay_out(lead, ceiling, seed, nodes)
        if before is None:
            return 0
        for found in (before, *done):
            for k, place in found.items():
                offsets[k] = place
        return len(done)

    def _states(
        self, lock: _Lock, at: int, offsets: Sequence[int], ceiling: int
    ) -> Iterator[list[int]]:
        """Places for what crosses the beginning of a lock: what comes and goes in the same passes
        lies together, in every order of these groups, some at the bottom, the others at the
        ceiling."""
        problem = self.board.reduced
        crossing = lock.crossings[0]
        given = {k: offsets[k] for k in crossing if self._pass_of[k] < at}
        groups: dict[tuple[int, int], list[int]] = {}
        for k in crossing:
            if k not in given:
                ends = bisect_left(self._begins, problem.upper[k])
                groups.setdefault((ends, self._pass_of[k]), []).append(k)
        if not groups or len(groups) > LARGEST_GROUPS:
            return
        for order in itertools.permutations(sorted(groups)):
            for low in range(len(order), -1, -1):
                state = dict(given)
                bottom = 0
                top = min([ceiling, *(self._far[k] for k in crossing if k in self._far)])
                for g in order[:low]:
                    for k in groups[g]:
                        state[k] = bottom
                        bottom += problem.size[k]
                for g in order[low:]:
                    for k in groups[g]:
                        top -= problem.size[k]
                        state[k] = top
                yield [state[k] for k in crossing]

    # ---- windows

    def _window(self, at: int, end: int, offsets: Places, pinned: Mapping[int, int]) -> _Window:
        """The passes [at, end) with what lives on from before; members in `pinned` are given."""
        problem = self.board.reduced
        members = tuple(k for one in self.passes[at:end] for k in one.buffers)
        begin = self._begins[at]
        until = self._begins[end] + 1 if end < len(self._begins) else problem.cliques
        lower = [problem.lower[k] - begin for k in members]
        upper = [min(problem.upper[k], until) - begin for k in members]
        size = [problem.size[k] for k in members]
        pins = [pinned.get(k, self._far.get(k, -1)) for k in members]
        for low, high, lasts in self._pinned(at, begin, until, offsets):
            lower.append(0)
            upper.append(lasts)
            size.append(high - low)
            pins.append(low)
        part = reduce_problem(lower, upper, size, divide_sizes=False)
        life = [problem.life[k] for k in members] + part.life[len(members) :]
        part = Reduced(part.lower, part.upper, part.size, life, part.start, part.unit)
        return _Window(members, part, pins)

    def _pinned(
        self, at: int, begin: int, until: int, offsets: Places
    ) -> list[tuple[int, int, int]]:
        """(low, high, end) of what lives across the beginning of a pass."""
        problem = self.board.reduced
        alive = sorted(
            (offsets[k], offsets[k] + problem.size[k], min(problem.upper[k], until) - begin)
            for k in self._crossing[at]
        )
        merged: list[tuple[int, int, int]] = []
        for low, high, lasts in alive:
            if merged and merged[-1][1] == low and merged[-1][2] == lasts:
                merged[-1] = (merged[-1][0], high, lasts)
            else:
                merged.append((low, high, lasts))
        return merged

    def _lay_out(
        self, window: _Window, ceiling: int, seed: int, nodes: int
    ) -> dict[int, int] | None:
        """Offsets of the window's members below the ceiling."""
        key = (ceiling, seed, nodes, window.key())
        known = self._known.get(key)
        if known is None:
            known = self._search(window, ceiling, seed, nodes) or []
            if not self.board.stop:
                self._known[key] = known
        return dict(zip(window.members, known, strict=True)) if known else None

    def _search(self, window: _Window, ceiling: int, seed: int, nodes: int) -> list[int] | None:
        """The buffers at the moments of highest load first, the others around them; then all at
        once."""
        part, count = window.part, len(window.members)
        loads = part.loads()
        if max(loads) > ceiling:
            return None
        pinned = [i for i, at in enumerate(window.pins) if at >= 0]
        rest_greedy = Greedy(part, self.board.stop)
        before = 0
        for threshold in THRESHOLDS:
            hot = [load >= threshold * ceiling for load in loads]
            chosen = sorted({*touching(part.lower, part.upper, hot), *pinned})
            if len(chosen) == before:
                continue
            before = len(chosen)
            sub = part.subset(chosen)
            pins = [window.pins[i] // sub.unit if window.pins[i] >= 0 else -1 for i in chosen]
            if any(window.pins[i] % sub.unit for i in chosen if window.pins[i] >= 0):
                continue  # the pins lie between the multiples in which this part would be searched
            with Search(sub, ceiling // sub.unit, seed=seed, pins=pins) as search:
                result = search.run(nodes=nodes, stop=self.board.stop)
            if result.outcome is Outcome.INFEASIBLE:
                return None
            if result.offsets is None:
                continue
            fixed = list(window.pins)
            for i, at in zip(chosen, result.offsets, strict=True):
                fixed[i] = at * sub.unit
            full = self._complete(rest_greedy, fixed, ceiling)
            if full is not None:
                return full[:count]
        return None

    def _complete(self, greedy: Greedy, fixed: list[int], ceiling: int) -> list[int] | None:
        size, life = greedy.problem.size, greedy.problem.life
        rest = [i for i, at in enumerate(fixed) if at < 0]
        for key in (lambda i: (-size[i], -life[i]), lambda i: (-life[i], -size[i])):
            order = sorted(rest, key=key)
            for best_fit in (False, True):
                full = greedy.place(order, best_fit=best_fit, ceiling=ceiling, fixed=fixed)
                if full is not None:
                    return full
        return None
