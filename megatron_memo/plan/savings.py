"""What a plan saves: PyTorch's caching allocator on the same requests, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .caching_allocator import replay_until_steady
from .requests import Requests


@dataclass(frozen=True)
class Savings:
    """Bytes reserved for the planned requests, iteration after iteration until nothing is added.

    Attributes:
        native, expandable: by the allocator with default settings, and with expandable segments.
        iterations: simulated of each; the larger number.
    """

    native: int
    expandable: int
    iterations: int


def savings_of(windows: Sequence[Requests]) -> Savings:
    """Simulates one iteration of each window in turn, again and again."""
    traces = []
    for requests in windows:
        picked = (requests.requests[k] for k in requests.planned)
        traces.append([(r.lower, r.upper, r.size) for r in picked if r.upper is not None])
    native, rounds = replay_until_steady(traces)
    expandable, more = replay_until_steady(traces, expandable_segments=True)
    return Savings(native.reserved, expandable.reserved, max(rounds, more))
