"""Host memory near a GPU: the node of its PCI slot, and pages that come from there.

The node is preferred, not enforced: where it is full, pages come from another one, slower to copy
and better than an end of the run.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFERRED = 1  # MPOL_PREFERRED of <linux/mempolicy.h>
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device; None where the kernel does not tell, or there is one only.

    Args:
        domain, bus, device: its address, as `torch.cuda.get_device_properties` has it.
        root: where the file system begins.
    """
    slot = root / "sys/bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((slot / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Has pages of a mapping that are not there yet come from `node`.

    Args:
        address: of the mapping, page-aligned.
        nbytes: of the mapping.
        node: a NUMA node.

    Returns:
        None if done, else why not: a container may forbid it, and the run goes on without.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"unknown on {platform.machine()}"
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << (node % _WORD)
    call = ctypes.CDLL(None, use_errno=True).syscall
    # mbind(addr, len, mode, nodemask, maxnode, flags): maxnode counts one bit more than there are.
    failed = call(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(words * _WORD + 1), ctypes.c_uint(0),
    )  # fmt: skip
    return os.strerror(ctypes.get_errno()) if failed else None
