"""`solve`: the ratio, what keeps the step from being shorter, and what relaxing that would buy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from megatron_memo.sizes import size_words

from .cost import Cost, Decision, cost
from .model import cheapest
from .problem import Depth, Disk, Link, NoRoom, Problem

_A_LITTLE = 1.1
# Savings below this part of a step are the resolution of the model, not a saving.
_NOTHING = 1e-7
_BOUNDLESS = 1 << 62


class Limit(Enum):
    """What can keep a step from being shorter."""

    COMPUTE = "compute"  # no limit that could be relaxed
    D2H = "D2H bandwidth"
    H2D = "H2D bandwidth"
    HOST = "host memory"
    DISK_SPACE = "disk space"
    DISK_SPEED = "disk bandwidth"
    DEVICE = "device memory"


@dataclass(frozen=True)
class Relaxed:
    """What one limit costs.

    Attributes:
        limit: which.
        saves_with_a_tenth_more: seconds a step gets shorter if it is 10% higher.
        saves_without: seconds, if it does not exist.
    """

    limit: Limit
    saves_with_a_tenth_more: float
    saves_without: float


@dataclass(frozen=True)
class Choice:
    """The answer.

    Attributes:
        ratio: for `MemoConfig.swap_ratio`; `rows` of the problem's rows.
        rows: swapped, to host memory or the disk.
        depth: of the buffers.
        step_seconds: of a whole step.
        exposed_d2h, exposed_h2d: seconds of it in which compute stands still for what leaves or
            comes back, over the link or the disk.
        host_bytes, disk_bytes, device_bytes: taken; device_bytes by buffers.
        binds: the limit whose relaxing buys most.
        relaxed: what each limit costs; those that are not there are left out.
    """

    ratio: float
    rows: int
    depth: Depth
    step_seconds: float
    exposed_d2h: float
    exposed_h2d: float
    host_bytes: int
    disk_bytes: int
    device_bytes: int
    binds: Limit
    relaxed: tuple[Relaxed, ...]


def solve(problem: Problem) -> Choice:
    """The decision with the shortest step that fits into host, disk and device memory.

    Raises:
        NoRoom: nothing fits.
        ValueError: see `model.cheapest`.
    """
    if problem.swapping == 0:
        # Nothing is swapped here, so any ratio will do: other ranks decide.
        return _answer(problem, Decision(problem.rows, 0.0, problem.depths[0]), Limit.COMPUTE, ())
    decision = cheapest(problem)
    if decision is None:
        raise _no_room(problem)
    found = cost(problem, decision)
    relaxed = []
    for limit, relax in _RELAX.items():
        more, without = relax(problem, _A_LITTLE), relax(problem, math.inf)
        if more is None or without is None:
            continue
        relaxed.append(Relaxed(limit, _saved(found, more), _saved(found, without)))
    binds = _binding(problem, found, relaxed)
    return _answer(problem, decision, binds, tuple(relaxed))


def _answer(
    problem: Problem, decision: Decision, binds: Limit, relaxed: tuple[Relaxed, ...]
) -> Choice:
    found = cost(problem, decision)
    return Choice(
        ratio=decision.rows / problem.rows,
        rows=decision.rows,
        depth=decision.depth,
        step_seconds=found.step,
        exposed_d2h=found.exposed_forward,
        exposed_h2d=found.exposed_backward,
        host_bytes=math.ceil(found.host),
        disk_bytes=math.ceil(found.disk),
        device_bytes=math.ceil(found.device),
        binds=binds,
        relaxed=relaxed,
    )


def _no_room(problem: Problem) -> NoRoom:
    """Which limit a ratio of 0 breaks: it needs the least of every memory."""
    if problem.device is not None:
        groups = problem.groups(0)
        buffers = min(depth.layers(groups) for depth in problem.depths) * problem.always
        if buffers > problem.device:
            return NoRoom(
                f"device memory {size_words(problem.device)} for buffers: not enough for "
                f"--memo-swap-ratio 0, whose buffers take {size_words(buffers)}. Split the "
                "sequence over more ranks, or give --memo-chunks a higher number."
            )
    least = problem.most_held * problem.always
    there, at_least = f"host memory {size_words(problem.host)}", least
    if problem.disk is not None:
        there += f" and disk space {size_words(problem.disk.nbytes)}"
        at_least = max(least - problem.disk.nbytes, 0)
    return NoRoom(
        f"{there}: not enough for --memo-swap-ratio 0. The inputs and attention outputs of "
        f"{problem.most_held} layers in flight take {size_words(least)}, so host memory must be "
        f"at least {size_words(at_least)}. Run fewer ranks a node, split the sequence over more "
        "ranks, or raise --memo-resident-layers."
    )


def _saved(found: Cost, problem: Problem) -> float:
    decision = cheapest(problem)
    assert decision is not None, "a relaxed limit fits more"
    saved = found.step - cost(problem, decision).step
    return saved if saved > _NOTHING * found.step else 0.0


def _binding(problem: Problem, found: Cost, relaxed: list[Relaxed]) -> Limit:
    """The limit whose relaxing buys most: a little of it if that buys anything, else all of it."""
    for gain in (
        lambda limit: limit.saves_with_a_tenth_more,
        lambda limit: limit.saves_without,
    ):
        most = max(relaxed, key=gain, default=None)
        if most is not None and gain(most) > 0:
            return most.limit
    # Two limits at the same place: each alone buys nothing, together they do.
    everything = problem
    for relax in _RELAX.values():
        everything = relax(everything, math.inf) or everything
    if _saved(found, everything) > 0:
        tight = _tightest(problem, found)
        return max(tight, key=lambda limit: tight[limit])
    return Limit.COMPUTE


def _tightest(problem: Problem, found: Cost) -> dict[Limit, float]:
    """How much of each limit is used, from 0 to 1."""
    share = problem.both_share
    moved = (found.host + found.disk) / max(problem.most_held, 1)
    used = {
        Limit.HOST: found.host / max(problem.host, 1),
        Limit.D2H: moved * problem.link.seconds_out(share) / (found.forward or 1.0),
        Limit.H2D: moved * problem.link.seconds_in(share) / (found.backward or 1.0),
    }
    if problem.device is not None:
        used[Limit.DEVICE] = found.device / max(problem.device, 1)
    if problem.disk is not None:
        used[Limit.DISK_SPACE] = found.disk / max(problem.disk.nbytes, 1)
    return used


# ---- each limit, `times` as high; None where there is no such limit


def _d2h(problem: Problem, times: float) -> Problem:
    link = problem.link
    both = link.d2h_both and link.d2h_both * times
    return replace(problem, link=Link(link.d2h * times, link.h2d, both, link.h2d_both))


def _h2d(problem: Problem, times: float) -> Problem:
    link = problem.link
    both = link.h2d_both and link.h2d_both * times
    return replace(problem, link=Link(link.d2h, link.h2d * times, link.d2h_both, both))


def _host(problem: Problem, times: float) -> Problem:
    return replace(problem, host=_times(problem.host, times))


def _device(problem: Problem, times: float) -> Problem | None:
    if problem.device is None:
        return None
    return replace(problem, device=_times(problem.device, times))


def _disk_space(problem: Problem, times: float) -> Problem | None:
    disk = problem.disk
    if disk is None:
        return None
    return replace(problem, disk=Disk(_times(disk.nbytes, times), disk.write, disk.read))


def _disk_speed(problem: Problem, times: float) -> Problem | None:
    disk = problem.disk
    if disk is None:
        return None
    return replace(problem, disk=Disk(disk.nbytes, disk.write * times, disk.read * times))


def _times(nbytes: int, times: float) -> int:
    return _BOUNDLESS if math.isinf(times) else int(nbytes * times)


_RELAX: dict[Limit, Callable[[Problem, float], Problem | None]] = {
    Limit.D2H: _d2h,
    Limit.H2D: _h2d,
    Limit.HOST: _host,
    Limit.DISK_SPACE: _disk_space,
    Limit.DISK_SPEED: _disk_speed,
    Limit.DEVICE: _device,
}
