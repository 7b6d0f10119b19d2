"""Policy: which blocks lie in host memory and which on disk."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megatron_memo.config import HostSettings
from megatron_memo.swap.backend import Backend
from megatron_memo.swap.disk import DiskBlock, DiskTier, SpillingBackend
from megatron_memo.swap.disk_file import SECTOR, SpillFile
from megatron_memo.swap.host import HostBlock, HostPool


class TieredPool:
    """Host memory, and a file for what it cannot hold; see `swap.host.HostPool` for the methods.

    If it is known how much will spill, blocks go to the file at even distances, so that the disk
    works all the time that it has. Otherwise, or where that was too little, those go that host
    memory has no room for. The same takes in the same order lead to the same places.

    Args:
        host: host memory with its limit.
        tier: the disk.
        share: the part of all bytes that the disk is to hold.
    """

    def __init__(self, host: HostPool, tier: DiskTier, share: float):
        self._host, self._tier, self._share = host, tier, share
        self._due = 0.0  # bytes that should be on disk and are not

    def take(self, nbytes: int) -> HostBlock:
        if self.taken == 0:
            self._due = 0.0
        self._due += self._share * nbytes
        if self._due < nbytes / 2:
            with suppress(MemoryError):  # then the disk has room, or says what is missing
                return self._host.take(nbytes)
        try:
            return self._on_disk(nbytes)
        except MemoryError as full:
            try:
                return self._host.take(nbytes)
            except MemoryError:
                raise full from None

    def give_back(self, block: HostBlock) -> None:
        if isinstance(block, DiskBlock):
            self._tier.give_back(block)
        else:
            self._host.give_back(block)

    def give_up_idle(self) -> None:
        self._host.give_up_idle()

    @property
    def total_bytes(self) -> int:
        """Of host memory, what disk copies go through included."""
        return self._host.total_bytes + self._tier.host_bytes

    @property
    def taken(self) -> int:
        return self._host.taken + self._tier.file.taken

    @property
    def disk_bytes(self) -> int:
        """Allocated on disk."""
        return self._tier.file.nbytes

    def _on_disk(self, nbytes: int) -> HostBlock:
        block = self._tier.take(nbytes)
        self._due -= nbytes
        return block


def storage(backend: Backend, settings: HostSettings) -> tuple[Any, Any]:
    """The backend and the pool that an engine uses.

    Args:
        backend: the device's.
        settings: limits, and a folder for what host memory cannot hold.

    Raises:
        OSError: the folder takes no files.
        MemoryError: the disk has no room for what will spill.
    """
    if settings.nvme_path is None:
        return backend, HostPool(backend.new_host_block, backend.synchronize, settings.budget)
    assert settings.nvme_budget is not None
    file = SpillFile(settings.nvme_path, settings.nvme_budget)
    tier = DiskTier(backend, file, settings.budget)
    room = (settings.nvme_budget - file.nbytes) // SECTOR * SECTOR
    if settings.spill and room > 0:
        file.reserve(min(-(-settings.spill // SECTOR) * SECTOR, room))
    spilling = SpillingBackend(backend, tier)
    limit = None if settings.budget is None else max(settings.budget - tier.host_bytes, 0)
    host = HostPool(backend.new_host_block, spilling.synchronize, limit)
    share = settings.spill / settings.need if settings.need else 0.0
    return spilling, TieredPool(host, tier, share)
