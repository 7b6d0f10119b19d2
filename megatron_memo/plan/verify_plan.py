"""The independent check of a plan, by itself and against the traces it is made for.

Shares the sweep with `verify` and nothing with the solvers, nor with the code that reads the
requests off a trace: what a plan has to hold is worked out here a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_memo.profile.trace import Enter, Free, Malloc, Trace

from .plan_file import Entry, Plan, PlanError, Window
from .verify import LayoutError, verify_layout


class WrongPlanError(PlanError):
    """A plan that could be read, and is wrong."""


@dataclass(frozen=True)
class Checked:
    """What was seen of a plan without faults."""

    windows: int
    planned: int
    native: int
    peak: int  # highest end of a block in the arena
    most_alive: int  # most planned bytes alive at once


def verify_plan(plan: Plan) -> Checked:
    """Checks a plan by what it says itself.

    Raises:
        WrongPlanError: blocks that are alive at once overlap; one lies outside of the arena or is
            not aligned; a request that is to be planned has no offset, or one that can't be has
            one; requests out of order; bytes of arena or bound that contradict the entries.
    """
    if not plan.windows:
        raise WrongPlanError("the plan has no window")
    planned = native = peak = most_alive = 0
    for number, window in enumerate(plan.windows):
        where = f"window {number} ({window.source})"
        _check_entries(plan, window, where)
        placed = [(k, e) for k, e in enumerate(window.entries) if e.offset is not None]
        try:
            seen = verify_layout(
                [f"request {k}" for k, _ in placed],
                [e.lower for _, e in placed],
                [e.lower if e.upper is None else e.upper for _, e in placed],
                [_up(e.size, plan.rounding) for _, e in placed],
                [e.offset for _, e in placed],
                capacity=plan.arena,
                alignment=plan.rounding,
            )
        except LayoutError as error:
            raise WrongPlanError(f"{where}: {error}") from error
        planned += len(placed)
        native += len(window.entries) - len(placed)
        peak = max(peak, seen.peak)
        most_alive = max(most_alive, seen.most_alive)
    if peak != plan.arena:
        raise WrongPlanError(f"the arena is said to be {plan.arena} bytes, the plan needs {peak}")
    if not most_alive <= plan.bound <= plan.arena:
        raise WrongPlanError(
            f"the bound is said to be {plan.bound} bytes; it must be from {most_alive}, the most "
            f"alive at once, to the arena's {plan.arena}"
        )
    return Checked(len(plan.windows), planned, native, peak, most_alive)


def verify_against(plan: Plan, trace: Trace, sha256: str) -> str:
    """Checks that the plan covers this trace: every request, in order. Returns the window's source.

    Args:
        sha256: digest of the trace's file.

    Raises:
        WrongPlanError: made for something else, or its entries are not the trace's requests.
    """
    window = _window_of(plan, trace, sha256)
    header = trace.header
    for name, mine, theirs in (
        ("device", plan.device, header.device),
        ("rounding", plan.rounding, header.rounding),
        ("world size", plan.world_size, header.world_size),
    ):
        if mine != theirs:
            raise WrongPlanError(f"the plan has {name} {mine}, the trace {theirs}")
    if header.rank != plan.rank and header.rank not in plan.same_ranks:
        raise WrongPlanError(f"the plan is for rank {plan.rank}, the trace of rank {header.rank}")
    if window.phases != trace.phases:
        raise WrongPlanError(f"{window.source}: the plan's phases are not the trace's")
    weight: dict[int, int] = {}
    count = 0
    for wanted in _requests(trace):
        if count == len(window.entries):
            raise WrongPlanError(f"{window.source}: the trace's request {count} has no entry")
        entry = window.entries[count]
        if entry._replace(offset=None) != wanted:
            raise WrongPlanError(
                f"{window.source}: entry {count} ({_words(window, entry)}) is not the trace's "
                f"request ({_words(window, wanted)})"
            )
        if wanted.upper is not None:
            weight[wanted.stream] = weight.get(wanted.stream, 0) + wanted.size
        count += 1
    if count != len(window.entries):
        raise WrongPlanError(
            f"{window.source}: {len(window.entries)} entries for the trace's {count} requests"
        )
    if weight and weight.get(window.stream, 0) < max(weight.values()):
        raise WrongPlanError(f"{window.source}: stream {window.stream} is not the main one")
    return window.source


def fingerprint_differences(planned: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what differs; empty when nothing does."""
    found = []
    for name in sorted({*planned, *now}):
        if name not in now:
            found.append(f"{name} was {planned[name]!r} and is not there now")
        elif name not in planned:
            found.append(f"{name} is {now[name]!r} and was not there")
        elif planned[name] != now[name]:
            found.append(f"{name} was {planned[name]!r} and is {now[name]!r}")
    return found


def _check_entries(plan: Plan, window: Window, where: str) -> None:
    before = -1
    for k, entry in enumerate(window.entries):
        if entry.lower <= before:
            raise WrongPlanError(f"{where}: request {k} is out of order")
        before = entry.lower
        if entry.size < 1 or (entry.upper is not None and entry.upper <= entry.lower):
            raise WrongPlanError(f"{where}: request {k} ({_words(window, entry)}) makes no sense")
        to_plan = (
            entry.stream == window.stream
            and entry.upper is not None
            and _up(entry.size, plan.rounding) >= plan.smallest
        )
        if to_plan and entry.offset is None:
            raise WrongPlanError(f"{where}: request {k} ({_words(window, entry)}) has no offset")
        if not to_plan and entry.offset is not None:
            raise WrongPlanError(
                f"{where}: request {k} ({_words(window, entry)}) can't be planned and has an offset"
            )


def _window_of(plan: Plan, trace: Trace, sha256: str) -> Window:
    """The window made from this very file, else the one with its fingerprint and requests."""
    for window in plan.windows:
        if window.sha256 == sha256:
            fingerprint = window.fingerprint
            if fingerprint != trace.header.fingerprint:
                raise WrongPlanError(f"{window.source}: its fingerprint is not the trace's")
            return window
    fits = [w for w in plan.windows if w.fingerprint == trace.header.fingerprint]
    if not fits:
        nearest = min(
            (
                fingerprint_differences(w.fingerprint, trace.header.fingerprint)
                for w in plan.windows
            ),
            key=len,
        )
        raise WrongPlanError(f"the plan was made for something else: {'; '.join(nearest[:3])}")
    asked = list(_requests(trace))
    for window in fits:
        if [entry._replace(offset=None) for entry in window.entries] == asked:
            return window
    return fits[0]


def _requests(trace: Trace) -> Iterator[Entry]:
    ends = {event.id: time for time, event in enumerate(trace.events) if isinstance(event, Free)}
    phase = 0
    for time, event in enumerate(trace.events):
        if isinstance(event, Enter):
            phase = event.phase
        elif isinstance(event, Malloc):
            yield Entry(phase, event.size, event.stream, None, time, ends.get(event.id))


def _words(window: Window, entry: Entry) -> str:
    phase = window.phases[entry.phase] if entry.phase < len(window.phases) else "?"
    end = "the end and longer" if entry.upper is None else entry.upper
    return (
        f"{entry.size} bytes on stream {entry.stream} in {phase}, alive from {entry.lower} to {end}"
    )


def _up(size: int, rounding: int) -> int:
    return -(-size // rounding) * rounding
