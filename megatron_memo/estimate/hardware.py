"""GPUs and the machines around them: what datasheets promise and what copies reach.

Dense rates are of bf16 matrix products without sparsity. Bandwidths are bytes a second in one
direction. What is "achieved" over a host link is what large copies from pinned memory usually
reach of the specified rate (about 80% over PCI Express, 85% over NVLink-C2C, where packets carry
headers); it is no measurement of ours. `cost.Calibration` corrects it by what a run measured.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

GB, GIB, TIB = 10**9, 2**30, 2**40
CPU = "cpu"  # the entry for runs without a GPU
_PCIE_SHARE, _C2C_SHARE = 0.8, 0.85
_PCIE_4, _PCIE_5, _C2C = 31.5 * GB, 63 * GB, 450 * GB  # PCI-SIG x16; NVIDIA Grace datasheet


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in the server it is usually sold in.

    Attributes:
        dense_rate: operations a second.
        memory: bytes of device memory.
        memory_bandwidth: of device memory.
        multiprocessors: that share a matrix product's tiles.
        host_link_spec: to the host, as specified.
        host_link: to the host, as achieved by one GPU that has the link for itself.
        sharing: GPUs that share one link to the host.
        nvlink: to the other GPUs of the node.
        source: where the numbers are from.
    """

    name: str
    dense_rate: float
    memory: int
    memory_bandwidth: float
    multiprocessors: int
    host_link_spec: float
    host_link: float
    sharing: int
    nvlink: float
    source: str

    @property
    def host_bandwidth(self) -> float:
        """To the host and from it, each way, while all GPUs of the node copy."""
        return self.host_link / self.sharing


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind of GPU. Memory in bytes, bandwidth in bytes a second of one direction.

    Attributes:
        gpus: of a node.
        host_memory: of a node.
        host_free: bytes of a node's host memory that activations leave to others.
        network: between nodes, of one GPU.
        disk: bytes of a node that activations may have; 0 without.
        disk_write, disk_read: of a node, shared by its GPUs.
    """

    gpu: Gpu
    gpus: int = 8
    host_memory: int = 2 * TIB
    host_free: int = 0
    network: float = 25 * GB  # 200 Gbit/s, one adapter a GPU
    disk: int = 0
    disk_write: float = 5 * GB
    disk_read: float = 6 * GB

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus-per-node {self.gpus}: must be at least 1.")
        for name, flag in (("host_memory", "--host-memory"), ("disk", "--memo-nvme-budget")):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag} {getattr(self, name)}: bytes can't be below 0.")
        for name in ("network", "disk_write", "disk_read"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)}: a bandwidth must be above 0.")

    @property
    def host_memory_of_gpu(self) -> int:
        """Bytes of host memory that are one GPU's share."""
        return (self.host_memory - self.host_free) // self.gpus


def _ampere(name: str, memory: int, bandwidth: float, nvlink: float, source: str) -> Gpu:
    # HGX A100: a PCI Express switch, with one x16 link to the host, for two GPUs.
    link = _PCIE_4
    return Gpu(name, 312e12, memory, bandwidth, 108, link, _PCIE_SHARE * link, 2, nvlink, source)


def _hopper(name: str, memory: int, bandwidth: float, source: str) -> Gpu:
    link = _PCIE_5
    return Gpu(name, 989e12, memory, bandwidth, 132, link, _PCIE_SHARE * link, 1, 450 * GB, source)


_A100_SOURCE = "NVIDIA A100 datasheet (SXM), HGX A100 platform description"
_A800_SOURCE = "NVIDIA A100 datasheet; A800: the same with 400 GB/s of NVLink in both directions"

GPUS = {
    gpu.name: gpu
    for gpu in (
        _ampere("a100-40g", 40 * GIB, 1555 * GB, 300 * GB, _A100_SOURCE),
        _ampere("a100-80g", 80 * GIB, 2039 * GB, 300 * GB, _A100_SOURCE),
        _ampere("a800-40g", 40 * GIB, 1555 * GB, 200 * GB, _A800_SOURCE),
        _ampere("a800-80g", 80 * GIB, 2039 * GB, 200 * GB, _A800_SOURCE),
        _hopper("h100-80g", 80 * GIB, 3350 * GB, "NVIDIA H100 datasheet (SXM)"),
        _hopper("h200-141g", 141 * GB, 4800 * GB, "NVIDIA H200 datasheet (SXM)"),
        Gpu(
            name="b200-180g",
            dense_rate=2250e12,
            memory=180 * GB,
            memory_bandwidth=7700 * GB,
            multiprocessors=148,
            host_link_spec=_PCIE_5,
            host_link=_PCIE_SHARE * _PCIE_5,
            sharing=1,
            nvlink=900 * GB,
            source="NVIDIA HGX B200 datasheet",
        ),
        Gpu(
            name="gb200-186g",
            dense_rate=2500e12,
            memory=186 * GB,
            memory_bandwidth=8000 * GB,
            multiprocessors=148,
            host_link_spec=_C2C,
            host_link=_C2C_SHARE * _C2C,
            sharing=2,
            nvlink=900 * GB,
            source="NVIDIA GB200 NVL72 datasheet; one Grace serves two GPUs",
        ),
        # A rank without a GPU: round numbers above what one core reaches. Only a calibration makes
        # sense of them.
        Gpu(
            name=CPU,
            dense_rate=1e12,
            memory=4 * GIB,
            memory_bandwidth=50 * GB,
            multiprocessors=1,
            host_link_spec=20 * GB,
            host_link=20 * GB,
            sharing=1,
            nvlink=10 * GB,
            source="round numbers, to be calibrated by a run",
        ),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of that name; "a100" finds the one with most memory.

    Raises:
        ValueError: there is none; the message lists the nearest.
    """
    word = re.sub(r"(\d)gi?b$", r"\1g", name.strip().lower().replace("_", "-"))
    if word in GPUS:
        return GPUS[word]
    alike = [known for known in GPUS if known.split("-")[0] == word]
    if alike:
        return max((GPUS[known] for known in alike), key=lambda g: g.memory)
    nearest = difflib.get_close_matches(word, GPUS, n=3, cutoff=0.3) or list(GPUS)
    raise ValueError(
        f"--gpu {name}: not in the table. Nearest: {', '.join(nearest)}. All: {', '.join(GPUS)}."
    )


def faster_link(one: Gpu, factor: float) -> Gpu:
    """The same GPU with `factor` times the bandwidth to its host."""
    return replace(
        one, host_link=one.host_link * factor, host_link_spec=one.host_link_spec * factor
    )
