"""Simulation of PyTorch's CUDA caching allocator: how much a trace makes it reserve.

With default settings, one stream, a device that never runs full:

- requests are rounded up to 512 bytes; up to 1 MiB they are served from the small pool;
- a free block is taken by best fit (smallest size, then lowest address) and split if the rest is
  worth keeping: at least 512 bytes in the small pool, more than 1 MiB in the large one;
- freed blocks merge with free neighbours of their segment; segments are never given back here;
- without a free block a new segment is reserved: 2 MiB in the small pool; in the large one 20 MiB
  for requests below 10 MiB, else the request rounded up to 2 MiB;
- with expandable segments there is one segment a pool that grows at its end, by pages of 2 MiB
  (small) or 20 MiB (large), a free block at its end being extended; every block may be split.

So the simulation says what fragmentation costs, reserved against the most bytes alive at once.
Written from the allocator's documented behaviour and its observable statistics.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
ROUND = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
SEGMENT_ROUND = 2 * MIB
SPLIT_LARGE_ABOVE = MIB


@dataclass(frozen=True)
class Usage:
    """Bytes of one run. `rounded_peak` is the most bytes alive, each request rounded to 512."""

    reserved: int
    rounded_peak: int
    segments: int

    @property
    def overhead(self) -> float:
        """Reserved over alive: 1.0 is a perfect fit."""
        return self.reserved / self.rounded_peak if self.rounded_peak else 1.0


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; the handle of an allocation while it is not free."""

    address: int
    size: int
    small: bool
    asked: int = 0  # rounded size of the request it serves
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block)
    last: Block | None = None  # the end of the expandable segment

    def add(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block), key=_place)

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address), key=_place)]
        block.free = False


def _place(entry: tuple[int, int, Block]) -> tuple[int, int]:
    return entry[:2]


class CachingAllocator:
    """Handles are blocks: `free(allocate(n))`."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable = expandable_segments
        self.reserved = self.segments = self.alive = self.peak = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """A block for `size` bytes, at least one."""
        if size <= 0:
            raise ValueError(f"an allocation of {size} bytes makes no sense, it must be at least 1")
        size = round_up(size, ROUND)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size)
        if block is not None:
            pool.remove(block)
        elif self.expandable:
            block = self._grow(pool, size)
        else:
            block = self._new_segment(pool, size)
        self._split(pool, block, size)
        block.asked = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        return block

    def free(self, block: Block) -> None:
        """Gives a block back and merges it with free neighbours; twice is a ValueError."""
        if block.free or not block.asked:
            raise ValueError(f"the block at address {block.address} is not allocated")
        pool = self._small if block.small else self._large
        self.alive -= block.asked
        block.asked = 0
        after = block.after
        if after is not None and after.free:
            pool.remove(after)
            self._join(pool, block, after)
        before = block.before
        if before is not None and before.free:
            pool.remove(before)
            self._join(pool, before, block)
            block = before
        pool.add(block)

    def usage(self) -> Usage:
        """Of everything so far."""
        return Usage(self.reserved, self.peak, self.segments)

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        at = bisect.bisect_left(pool.free, (size, 0), key=_place)
        if at == len(pool.free):
            return None
        block = pool.free[at][2]
        # The end of an expandable segment counts with all that it could grow to: any other block
        # is the better fit.
        if self.expandable and block is pool.last and at + 1 < len(pool.free):
            return pool.free[at + 1][2]
        return block

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        if pool.small:
            amount = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            amount = LARGE_SEGMENT
        else:
            amount = round_up(size, SEGMENT_ROUND)
        block = Block(self._next_address, amount, pool.small)
        self._next_address += amount
        self.reserved += amount
        self.segments += 1
        return block

    def _grow(self, pool: _Pool, size: int) -> Block:
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = pool.last
        if last is not None and last.free:
            pool.remove(last)
            amount = round_up(size - last.size, page)
            last.size += amount
            self.reserved += amount
            return last
        amount = round_up(size, page)
        if last is None:
            self.segments += 1
        # The pools' address ranges are far apart; only the order within one matters.
        address = 0 if last is None else last.address + last.size
        block = Block(address, amount, pool.small, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        self.reserved += amount
        return block

    def _split(self, pool: _Pool, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUND if (pool.small or self.expandable) else rest <= SPLIT_LARGE_ABOVE:
            return
        remainder = Block(block.address + size, rest, pool.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remainder
        block.after = remainder
        block.size = size
        if pool.last is block:
            pool.last = remainder
        pool.add(remainder)

    def _join(self, pool: _Pool, left: Block, right: Block) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if pool.last is right:
            pool.last = left


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def replay(
    buffers: Iterable[tuple[int, int, int]], *, expandable_segments: bool = False, times: int = 1
) -> Usage:
    """Runs a trace of (lower, upper, size) through the allocator, `times` times in a row.

    At equal times frees come first, then requests in the order given.
    """
    trace = list(buffers)
    events = _events(trace)
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for _ in range(times):
        _run(allocator, trace, events)
    return allocator.usage()


def replay_until_steady(
    windows: Sequence[Sequence[tuple[int, int, int]]],
    *,
    expandable_segments: bool = False,
    most: int = 8,
) -> tuple[Usage, int]:
    """Runs several traces in turn, round after round, until a round reserves nothing more.

    Returns:
        The usage and the number of rounds, at most `most`.
    """
    prepared = [(list(window), _events(window)) for window in windows]
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    rounds, before = 0, -1
    while rounds < most and allocator.reserved != before:
        rounds += 1
        before = allocator.reserved
        for trace, events in prepared:
            _run(allocator, trace, events)
    return allocator.usage(), rounds


def _events(trace: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return sorted(
        [(lower, 1, k) for k, (lower, _, _) in enumerate(trace)]
        + [(upper, 0, k) for k, (_, upper, _) in enumerate(trace)]
    )


def _run(
    allocator: CachingAllocator,
    trace: Sequence[tuple[int, int, int]],
    events: Iterable[tuple[int, int, int]],
) -> None:
    live: dict[int, Block] = {}
    for _, begins, k in events:
        if begins:
            live[k] = allocator.allocate(trace[k][2])
        elif k in live:
            allocator.free(live.pop(k))
        else:
            raise ValueError(f"buffer {k} ends before it begins")
