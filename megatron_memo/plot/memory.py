"""Memory over an iteration: what is alive, the plan's arena, and what PyTorch would reserve."""

from __future__ import annotations

from megatron_memo.plan.caching_allocator import Block, CachingAllocator
from megatron_memo.plan.plan_file import Plan
from megatron_memo.plan.problem import section_loads
from megatron_memo.plot.figure import Axis, Figure, Line, Panel, Unit
from megatron_memo.plot.layout import EVENTS, bands, window_of
from megatron_memo.plot.palette import BLUE, GREEN, GREY, VERMILION
from megatron_memo.profile.trace import rounded
from megatron_memo.sizes import size_words

_ALLOCATORS = (
    ("PyTorch's allocator", False, VERMILION),
    ("with expandable segments", True, BLUE),
)

_ITERATIONS = 8  # at most, as `plan.savings` has it


def memory(plan: Plan, window: int | None = None) -> Figure:
    """The figure of one window's planned requests.

    PyTorch's caching allocator is simulated on them (`plan.caching_allocator`), from an empty
    cache; the legend says what it has when further iterations add nothing.

    Args:
        plan: verified.
        window: which, from 0; None for the one that needs most of the arena.

    Raises:
        PlanError: there is no such window.
    """
    _, shown = window_of(plan, window)
    planned = [
        (e.lower, e.upper, rounded(e.size, plan.rounding))
        for e in shown.entries
        if e.offset is not None and e.upper is not None
    ]
    end = max(upper for _, upper, _ in planned)
    loads = section_loads(*zip(*planned, strict=True))
    alive = [(0, 0), *((start, load) for start, _, load in loads), (end, 0)]
    lines = [
        Line(*_columns(alive), "alive", GREY, steps=True, fill=True),
        Line([0, end], [plan.arena] * 2, f"plan: {size_words(plan.arena)}", GREEN),
    ]
    for name, expandable, colour in _ALLOCATORS:
        grown, steady, rounds = _reserved(planned, expandable)
        label = f"{name}: {size_words(steady)}, {steady / plan.arena:.2f} times the plan"
        if rounds > 1:
            label += f", after {rounds} iterations"
        lines.append(Line(*_columns([*grown, (end, grown[-1][1])]), label, colour, steps=True))
    notes = (
        f"{shown.source}: {len(planned):,} planned requests of one rank. Weights, gradients and "
        "optimizer state come on top.",
        "PyTorch's caching allocator is simulated, from an empty cache.",
    )
    coarse, fine = bands(shown)
    y = Axis("reserved for one iteration", Unit.BYTES, from_zero=True)
    panel = Panel("", EVENTS, y, lines=tuple(lines), bands=coarse, fine=fine)
    return Figure("memory", "What one iteration makes an allocator reserve", notes, (panel,))


def _reserved(
    planned: list[tuple[int, int, int]], expandable: bool
) -> tuple[list[tuple[int, int]], int, int]:
    """(time, bytes reserved) wherever a first iteration takes more; bytes reserved when a further
    iteration adds nothing, and how many iterations that took."""
    events = sorted(
        [(lower, 1, k) for k, (lower, _, _) in enumerate(planned)]
        + [(upper, 0, k) for k, (_, upper, _) in enumerate(planned)]
    )
    allocator = CachingAllocator(expandable_segments=expandable)
    found = [(0, 0)]
    live: dict[int, Block] = {}
    last_that_added = 1
    for iteration in range(1, _ITERATIONS + 1):
        before = allocator.reserved
        for time, begins, k in events:
            if not begins:
                allocator.free(live.pop(k))
                continue
            live[k] = allocator.allocate(planned[k][2])
            if iteration == 1 and allocator.reserved != found[-1][1]:
                found.append((time, allocator.reserved))
        if allocator.reserved == before:
            break
        last_that_added = iteration
    return found, allocator.reserved, last_that_added


def _columns(points: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [x for x, _ in points], [y for _, y in points]
