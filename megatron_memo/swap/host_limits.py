"""How much host memory a process may still take, by everything that limits it.

Pure functions over a root folder and an environment, so that a made-up tree tests them. Read are

* every memory control group above the process, version 1 or 2 (`memory.max`, `memory.high`,
  `memory.limit_in_bytes`); a container may be limited at any level, and "max" or a huge number is
  none. What the group uses counts, page cache excepted: the kernel gives that up by itself;
* the kernel's estimate of what the machine has left (`MemAvailable`);
* what Slurm gave to the job on this node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron_memo.sizes import size_words

_NO_LIMIT = 1 << 60  # version 1 writes the largest page-aligned number for "none"
_MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """Memory that all processes under one limit may still take together.

    Attributes:
        free: bytes.
        origin: where it is written, and how large the limit is, for people.
    """

    free: int
    origin: str


def tightest(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Limit:
    """The limit that leaves least.

    Args:
        root: where the file system begins.
        env: Slurm's variables are read.

    Raises:
        OSError: `/proc/meminfo` cannot be read.
    """
    found = [_machine(root), *_groups(root), *_slurm(root, env)]
    return min(found, key=lambda limit: limit.free)


def local_ranks(env: Mapping[str, str] = os.environ) -> int:
    """Ranks of the job on this node, as torchrun, Open MPI or Slurm tell; 1 if nobody does."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        count = re.match(r"\d+", env.get(name, ""))  # Slurm: 8(x2),4
        if count and int(count[0]) > 0:
            return int(count[0])
    return 1


def _machine(root: Path) -> Limit:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
            return Limit(free, f"{size_words(free)} that the machine has left (MemAvailable)")
    raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable (a kernel before 3.14)")


# ---- control groups


def _groups(root: Path) -> Iterator[Limit]:
    """A limit for each memory control group of the process that has one."""
    for folder, version in _group_folders(root):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        for name in names:
            limit = _number(folder / name)
            if limit is not None and limit < _NO_LIMIT:
                path = "/" / (folder / name).relative_to(root)
                origin = f"the control group's limit of {size_words(limit)} in {path}"
                yield Limit(max(limit - _used(folder, version), 0), origin)


def _group_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the process's own group and all above it, with the version of each."""
    own = dict(_own_groups(root))
    for version, shown, mounted in _mounts(root):
        if version not in own:
            continue
        path = PurePosixPath(own[version])
        # Inside a container the mount may show a part of the tree only.
        path = path.relative_to(shown) if path.is_relative_to(shown) else path.relative_to("/")
        top = root / mounted.lstrip("/")
        for part in (path, *path.parents):
            # A parent directory reference: the group lies outside of what the container sees.
            if ".." not in part.parts and (top / part).is_dir():
                yield top / part, version


def _own_groups(root: Path) -> Iterator[tuple[int, str]]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """Version, shown part of the tree, and mount point of each mounted hierarchy with memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, _source, *options) = before.split(), after.split()
        if kind == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind == "cgroup" and "memory" in ",".join(options).split(","):
            yield 1, fields[3], fields[4]


def _used(folder: Path, version: int) -> int:
    """Bytes that the group holds and the kernel cannot take back."""
    prefix = "" if version == 2 else "total_"
    used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
            used -= int(value)
    return max(used, 0)


# ---- Slurm


def _slurm(root: Path, env: Mapping[str, str]) -> Iterator[Limit]:
    """What the job may take on this node, less what its ranks have taken, if each has our share."""
    total = _slurm_bytes(env)
    if total is None:
        return
    limit, variable = total
    taken = local_ranks(env) * _resident(root)
    origin = f"Slurm's {size_words(limit)} for the job on this node ({variable})"
    yield Limit(max(limit - taken, 0), origin)


def _slurm_bytes(env: Mapping[str, str]) -> tuple[int, str] | None:
    """Bytes and the variables they come from. 0 a node means all of its memory: no limit."""
    per_node = _mebibytes(env.get("SLURM_MEM_PER_NODE"))
    if per_node is not None:
        return (per_node, "SLURM_MEM_PER_NODE") if per_node else None
    for each, count in (
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        size, number = _mebibytes(env.get(each)), re.match(r"\d+", env.get(count, ""))
        if size and number:
            return size * int(number[0]), f"{each} times {count}"
    return None


def _mebibytes(text: str | None) -> int | None:
    """Slurm's sizes are MiB unless a letter says otherwise."""
    found = re.fullmatch(r"(\d+)([KMGT]?)", text or "", re.IGNORECASE)
    if found is None:
        return None
    power = {"K": -1, "": 0, "M": 0, "G": 1, "T": 2}[found[2].upper()]
    return int(int(found[1]) * _MIB * 1024.0**power)


def _resident(root: Path) -> int:
    fields = " ".join(_lines(root / "proc/self/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


# ---- files


def _lines(path: Path) -> list[str]:
    """[] for a file that this kernel does not have."""
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
