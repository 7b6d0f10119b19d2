"""A file that holds what host memory cannot: it has no name, and its bytes are there beforehand.

The file is unlinked before anything is in it, so whatever becomes of the process, the system takes
its space back. Space is allocated before it is promised to anybody, so a full disk is found while
the data is still elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from contextlib import suppress

from megatron_memo.sizes import size_words
from megatron_memo.swap.extents import Extents

SECTOR = 4096  # bytes: what direct reads and writes are multiples of, and where they begin


class SpillFile:
    """One file in a folder.

    Args:
        folder: on a disk of this node.
        limit: bytes that the file may have.

    Attributes:
        direct: reads and writes go past the page cache.
        nbytes: allocated.

    Raises:
        OSError: the folder takes no files.
    """

    def __init__(self, folder: str, limit: int):
        self._folder, self._limit = folder, limit
        self._fd = _nameless(folder)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._extents: list[tuple[int, Extents]] = []  # where each begins
        self.nbytes = self.taken = 0
        self.direct = False
        self._allocate(SECTOR)
        self.direct = self._go_direct()

    def take(self, nbytes: int) -> int:
        """Where `nbytes` (a multiple of SECTOR) may be written; the space is there.

        Raises:
            MemoryError: the disk or the limit has no more.
        """
        for start, extents in self._extents:
            at = extents.take(nbytes)
            if at is not None:
                self.taken += nbytes
                return start + at
        return self.reserve(nbytes).take(nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """What `take` gave may be overwritten."""
        for start, extents in self._extents:
            if start <= offset < start + extents.nbytes:
                extents.give_back(offset - start, nbytes)
                self.taken -= nbytes
                return
        raise AssertionError("not taken here")

    def reserve(self, nbytes: int) -> SpillFile:
        """Allocates so much more.

        Raises:
            MemoryError: as `take`.
        """
        start = self.nbytes
        if start + nbytes > self._limit:
            raise self._no_more(nbytes, f"the limit is {size_words(self._limit)}")
        self._allocate(start + nbytes)
        self._extents.append((start, Extents(nbytes)))
        return self

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data`; both are multiples of SECTOR.

        Raises:
            OSError: less than all was written.
        """
        done = os.pwrite(self._fd, data, offset)
        if done != len(data):
            raise OSError(errno.EIO, f"{done} of {len(data)} bytes written in {self._folder}")

    def read(self, data: memoryview, offset: int) -> None:
        """Fills `data`.

        Raises:
            OSError: less than all was read.
        """
        done = os.preadv(self._fd, [data], offset)
        if done != len(data):
            raise OSError(errno.EIO, f"{done} of {len(data)} bytes read in {self._folder}")

    def close(self) -> None:
        """Gives the space back to the disk."""
        self._close()

    def _allocate(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            raise self._no_more(nbytes - self.nbytes, error.strerror or str(error)) from error
        self.nbytes = nbytes

    def _go_direct(self) -> bool:
        """Asks the file system for direct access, and tries it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, SECTOR) as page, memoryview(page) as view:
                self.write(view, 0)
                self.read(view, 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def _no_more(self, nbytes: int, why: str) -> MemoryError:
        return MemoryError(
            f"--memo-nvme-path {self._folder}: memo has {size_words(self.nbytes)} there and could "
            f"not get another {size_words(nbytes)} ({why}). Free space there, raise "
            "--memo-nvme-budget or --memo-host-budget, or lower --memo-swap-ratio."
        )


def _nameless(folder: str) -> int:
    """A new file that no name leads to."""
    with suppress(OSError):  # a file system that always wants a name, if only for a moment
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    fd, name = tempfile.mkstemp(prefix="megatron-memo-", dir=folder)
    os.unlink(name)
    return fd
