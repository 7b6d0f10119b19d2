"""What a run measured to choose its swap ratio, and the file that keeps it.

One JSON object: `version`, `fingerprint` (what decides the numbers: model, layout, versions),
`machine`, `ratio` (what was chosen of it), and `ranks`, one `Measured` for each rank (null
for a rank without layers).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform as host_machine
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_memo import platform
from megatron_memo.plan.atomic_file import whole_file
from megatron_memo.plan.ratio import Link, Problem, Times
from megatron_memo.profile.fingerprint import differences

VERSION = 1
FILE_NAME = "ratio.json"


@dataclass(frozen=True)
class Measured:
    """One rank's layers and link; seconds and bytes are of one layer and micro-batch.

    Attributes:
        layers, resident: of this rank; resident ones are among the layers.
        micro_batches: of a step.
        rows, chunks: of a layer's input, and the pieces in which it is worked through.
        forward, backward, recompute: see `plan.ratio.Problem`.
        always, others: bytes.
        link: with all local ranks copying.
        other_seconds: of a step, outside of the layers.
        device: bytes that are left for buffers; None where nobody can tell.
        unsteady: how much longer a layer took in the slower of the two measured steps than in the
            faster one, which counts; as a part of it.
    """

    layers: int
    resident: int
    micro_batches: int
    rows: int
    chunks: int
    forward: Times
    backward: Times
    recompute: float
    always: int
    others: int
    link: Link
    other_seconds: float
    device: int | None = None
    unsteady: float = 0.0

    def problem(self, **limits: Any) -> Problem:
        """The program of this rank.

        Args:
            limits: `Problem`'s further arguments: what nobody measures.
        """
        return Problem(
            rows=self.rows,
            chunks=self.chunks,
            forward=self.forward,
            backward=self.backward,
            recompute=self.recompute,
            always=self.always,
            others=self.others,
            link=self.link,
            layers=self.layers,
            resident=self.resident,
            other_seconds=self.other_seconds,
            device=self.device,
            **limits,
        )


@dataclass(frozen=True)
class Record:
    """A file's content."""

    fingerprint: dict[str, Any]
    machine: str
    ratio: float
    ranks: Sequence[Measured | None]


def machine() -> str:
    """What the numbers are of besides the model: the devices, and how many a node has."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if platform.is_active():
        device = f"{host_machine.machine()} with {os.cpu_count()} cores"
    else:
        device = torch.cuda.get_device_name()
    return f"{device}, {local} ranks a node"


def write_record(path: Path, record: Record) -> None:
    """Writes the file whole, in a folder that is made if need be.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        json.dump({"version": VERSION, **dataclasses.asdict(record)}, file, indent=1)
        file.write("\n")


def read_record(path: Path) -> Record:
    """The file's content.

    Raises:
        ValueError: it cannot be read, or is no such file; one sentence that begins with the path.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(
            f"{path}: is not a file of measurements of version {VERSION} (it says {version})"
        )
    try:
        return Record(
            fingerprint=dict(found["fingerprint"]),
            machine=str(found["machine"]),
            ratio=float(found["ratio"]),
            ranks=tuple(None if row is None else _measured(row) for row in found["ranks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its content is not what it should be ({error!r})") from None


def unsuitable(record: Record, fingerprint: dict[str, Any], world_size: int) -> list[str]:
    """Why the measurements are not of this run, in words; empty if they are."""
    reasons = differences(record.fingerprint, fingerprint)
    if len(record.ranks) != world_size:
        reasons.append(f"it is of {len(record.ranks)} ranks, here are {world_size}")
    return reasons


def _measured(row: dict[str, Any]) -> Measured:
    parts = {"forward": Times, "backward": Times, "link": Link}
    return Measured(
        **{name: parts[name](**value) if name in parts else value for name, value in row.items()}
    )
