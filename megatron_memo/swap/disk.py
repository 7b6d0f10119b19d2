"""The disk tier: blocks that are files' bytes, copied through a few host blocks by threads.

NOTE: the way of a block
------------------------
Out: for each segment of the block, a writer thread takes its own host block, has the device copy
into it (ordered after compute, as any D2H), waits for that, and writes to the file. The block's
event is over when every segment is written: until then the tensors stay on the device, so that an
error of the disk is raised while the data is still there.

Back: for each segment a reader thread waits until the block was written, reads into its own host
block, and has it copied to the device (ordered after `ready`, as any H2D). The block's event is two
in one: all segments have been given to the H2D stream, which the host waits for, and their copies
are done, which the compute stream waits for.

A thread uses its host block again when the copy through it is over. Writers never wait for readers,
so a reader that waits for a write always gets it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_memo.swap.backend import Backend, Copy, Event
from megatron_memo.swap.disk_file import SECTOR, SpillFile
from megatron_memo.swap.host import HostBlock

THREADS = 4  # each way
LARGEST_SEGMENT = 8 << 20
_PART_OF_BUDGET = 8  # the threads' host blocks take at most so much of the host's budget


def staging_bytes(budget: int | None) -> int:
    """Host memory that disk copies go through, of a budget of so many bytes (None: no limit)."""
    segment = LARGEST_SEGMENT
    if budget is not None:
        segment = min(segment, budget // _PART_OF_BUDGET // (2 * THREADS))
    return 2 * THREADS * max(segment // SECTOR, 1) * SECTOR


class DiskBlock(HostBlock):
    """Bytes of a file. Copies go through a `DiskTier`."""

    def __init__(self, nbytes: int, offset: int):
        self.nbytes, self.offset = nbytes, offset
        self.written: DiskEvent | None = None

    @property
    def on_file(self) -> int:
        """Bytes of the file that it takes."""
        return -(-self.nbytes // SECTOR) * SECTOR

    def close(self) -> None:
        """The file keeps the space."""


class DiskEvent:
    """A point of some threads and of one stream; see the NOTE."""

    def __init__(self, segments: int):
        self._left = segments
        self._given = threading.Condition()
        self._error: BaseException | None = None
        self._copies: list[Event] = []

    def segment_done(self, copy: Event | None = None, error: BaseException | None = None) -> None:
        """One segment is through, up to `copy`, which a stream has still to do."""
        with self._given:
            self._left -= 1
            self._error = self._error or error
            if copy is not None:
                self._copies.append(copy)
            self._given.notify_all()

    def copies(self) -> list[Event]:
        """Waits for the threads; what the stream has still to do.

        Raises:
            RuntimeError: a segment failed.
        """
        with self._given:
            self._given.wait_for(lambda: self._left == 0)
        if self._error is not None:
            raise RuntimeError(
                f"activations could not be moved to or from disk ({self._error}); training cannot "
                "go on"
            ) from self._error
        return self._copies

    def synchronize(self) -> None:
        """Blocks until all of it is done."""
        for copy in self.copies():
            copy.synchronize()


class DiskTier:
    """Moves blocks between the device and a file.

    Args:
        backend: the device's streams.
        file: where the bytes are.
        budget: bytes of host memory that the tier may have a part of; None for no limit.

    Attributes:
        host_bytes: what it has.
    """

    def __init__(self, backend: Backend, file: SpillFile, budget: int | None):
        self._backend, self.file = backend, file
        self.host_bytes = staging_bytes(budget)
        self.segment = self.host_bytes // (2 * THREADS)
        # Made here, not by the threads: CUDA's current device is each thread's own.
        blocks = [backend.new_host_block(self.segment) for _ in range(2 * THREADS)]
        device = torch.cuda.current_device() if backend.name == "cuda" else None
        self._own = threading.local()
        self._idle, self._under_way = threading.Condition(), 0
        # The threads must not hold the tier, or they and the file would outlive it.
        self._writers, self._readers = (
            ThreadPoolExecutor(THREADS, f"memo-{name}", _begin_thread, (self._own, blocks, device))
            for name in ("disk-write", "disk-read")
        )

    def take(self, nbytes: int) -> DiskBlock:
        """A block of `nbytes`.

        Raises:
            MemoryError: no more space.
        """
        block = DiskBlock(nbytes, 0)
        block.offset = self.file.take(block.on_file)
        return block

    def give_back(self, block: DiskBlock) -> None:
        self.file.give_back(block.offset, block.on_file)

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> DiskEvent:
        """Writes the block that the copies lead to."""
        block = _block_of(copies)
        block.written = self._each_segment(
            self._writers, copies, lambda start, parts: self._write(block, start, parts, after)
        )
        return block.written

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> DiskEvent:
        """Reads the block that the copies lead to."""
        block = _block_of(copies)
        return self._each_segment(
            self._readers, copies, lambda start, parts: self._read(block, start, parts, after)
        )

    def synchronize(self) -> None:
        """Blocks until all threads are through with what they were given so far."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """Ends the threads and gives the space back; nothing may be under way."""
        self._writers.shutdown()
        self._readers.shutdown()
        self.file.close()

    def _each_segment(
        self,
        pool: ThreadPoolExecutor,
        copies: Sequence[Copy],
        move: Callable[[int, list[Copy]], Event | None],
    ) -> DiskEvent:
        segments = list(_segments(copies, self.segment))
        event = DiskEvent(len(segments))
        with self._idle:
            self._under_way += len(segments)

        def run(start: int, parts: list[Copy]) -> None:
            copy, error = None, None
            try:
                copy = move(start, parts)
            except BaseException as caught:  # noqa: BLE001 (raised again by DiskEvent.copies)
                error = caught
            # Before the event is over: who waits for it counts on the tensors being let go.
            parts.clear()
            event.segment_done(copy, error)
            try:
                if copy is not None:  # it reads from this thread's host block
                    copy.synchronize()
            finally:
                with self._idle:
                    self._under_way -= 1
                    self._idle.notify_all()

        for start, parts in segments:
            pool.submit(run, start, parts)
        return event

    def _write(self, block: DiskBlock, start: int, parts: list[Copy], after: Event | None) -> None:
        mine = self._mine()
        through = [Copy(part.device, mine, part.offset - start) for part in parts]
        self._backend.d2h(through, after).synchronize()
        length = min(self.segment, block.on_file - start)
        self.file.write(memoryview(mine.array)[:length], block.offset + start)

    def _read(
        self, block: DiskBlock, start: int, parts: list[Copy], after: Event | None
    ) -> Event | None:
        if block.written is not None:
            block.written.synchronize()
        mine = self._mine()
        length = min(self.segment, block.on_file - start)
        self.file.read(memoryview(mine.array)[:length], block.offset + start)
        through = [Copy(part.device, mine, part.offset - start) for part in parts]
        return self._backend.h2d(through, after)

    def _mine(self) -> HostBlock:
        return self._own.block


class SpillingBackend:
    """A `swap.backend.Backend` whose copies may lead to disk.

    Args:
        backend: the device's.
        tier: of the same device.
    """

    def __init__(self, backend: Backend, tier: DiskTier):
        self._backend, self._tier = backend, tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)  # all that has nothing to do with copies

    def compute_waits(self, event: Event) -> float:
        if not isinstance(event, DiskEvent):
            return self._backend.compute_waits(event)
        start = time.perf_counter()
        copies = event.copies()
        waited = time.perf_counter() - start
        return waited + sum(self._backend.compute_waits(copy) for copy in copies)

    def d2h(self, copies: Sequence[Copy], after: Event | None) -> Event:
        on_disk = bool(copies) and isinstance(copies[0].host, DiskBlock)
        return (self._tier if on_disk else self._backend).d2h(copies, after)

    def h2d(self, copies: Sequence[Copy], after: Event | None) -> Event:
        on_disk = bool(copies) and isinstance(copies[0].host, DiskBlock)
        return (self._tier if on_disk else self._backend).h2d(copies, after)

    def synchronize(self) -> None:
        self._tier.synchronize()
        self._backend.synchronize()


def _begin_thread(own: threading.local, blocks: list[HostBlock], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    own.block = blocks.pop()


def _block_of(copies: Sequence[Copy]) -> DiskBlock:
    block = copies[0].host
    assert isinstance(block, DiskBlock)
    assert all(copy.host is block for copy in copies)
    return block


def _segments(copies: Sequence[Copy], length: int) -> Iterator[tuple[int, list[Copy]]]:
    """The copies cut where segments of a block meet: start of each segment, and its pieces."""
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        done, nbytes = 0, copy.device.numel()
        while done < nbytes:
            at = copy.offset + done
            start = at // length * length
            piece = min(nbytes - done, start + length - at)
            part = Copy(copy.device[done : done + piece], copy.host, at)
            found.setdefault(start, []).append(part)
            done += piece
    yield from found.items()
