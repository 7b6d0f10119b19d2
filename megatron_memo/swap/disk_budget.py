"""How much of a disk a rank's activations may take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_memo.sizes import parse_size, size_words
from megatron_memo.swap.disk_file import SECTOR, SpillFile
from megatron_memo.swap.host_limits import local_ranks

_LEFT_FREE = 20  # one part in so many, where no budget is given


@dataclass(frozen=True)
class DiskBudget:
    """What one rank may take.

    Attributes:
        folder: where.
        bytes: of this rank.
        access: how its file is read and written, for people.
    """

    folder: str
    bytes: int
    access: str


def disk_budget(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> DiskBudget | None:
    """What `--memo-nvme-path` and `--memo-nvme-budget` allow; None without the former.

    Args:
        args: parsed.
        env: tells how many ranks share the disk.

    Raises:
        ValueError: no such folder, one that takes no files, or a budget that is none or is more
            than the disk has.
    """
    folder = getattr(args, "memo_nvme_path", None)
    text = getattr(args, "memo_nvme_budget", None)
    if folder is None:
        if text is not None:
            raise ValueError(
                f"--memo-nvme-budget {text}: has no effect without --memo-nvme-path, which names "
                "the folder. Add --memo-nvme-path, or drop the flag."
            )
        return None
    if not os.path.isdir(folder):
        raise ValueError(
            f"--memo-nvme-path {folder}: is no folder. Name an existing one on a local disk."
        )
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    nbytes = free - free // _LEFT_FREE
    if text is not None:
        try:
            nbytes = parse_size(text)
        except ValueError as reason:
            raise ValueError(f"--memo-nvme-budget {text}: {reason}.") from None
        if nbytes > free:
            raise ValueError(
                f"--memo-nvme-budget {text}: {folder} has {size_words(free)} left. Give less, free "
                "space there, or name another disk with --memo-nvme-path."
            )
    share = nbytes // local_ranks(env)
    return DiskBudget(folder, share, _access(folder, share))


def _access(folder: str, limit: int) -> str:
    """Makes a small file as the run will, to see that it can."""
    try:
        file = SpillFile(folder, max(limit, SECTOR))
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"--memo-nvme-path {folder}: takes no files ({reason}). Name a folder with write "
            "permission and free space."
        ) from None
    file.close()
    return "directly" if file.direct else "through the page cache, which counts as host memory"
