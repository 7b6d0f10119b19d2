"""Profiles one rank in a process of its own; see `profile.worker`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_MISTAKE = 2
_LINES = 40  # of what Megatron said, when it failed


class ProfileFailed(RuntimeError):
    """Megatron failed; the message is the end of what it said, and its status."""


def profile_rank(
    flags: Sequence[str],
    path: Path,
    *,
    rank: int,
    world_size: int,
    device: str,
    check: bool = False,
    show: bool = False,
    tell: Callable[[str], None] = lambda _words: None,
) -> dict[str, Any]:
    """Writes a rank's trace to `path`; what the worker found.

    Args:
        flags: of the training run.
        path: where the trace goes.
        rank, world_size: whom to play.
        device: whose kernels and allocator are asked about.
        check: compare a third iteration with the second.
        show: Megatron's messages are shown as they come.
        tell: called with a few words as the profile gets on.

    Raises:
        ValueError: a mistake in the flags, in one line.
        ProfileFailed: anything else.
    """
    with tempfile.TemporaryFile("w+") as said:
        output = None if show else said
        command = [sys.executable, "-m", "megatron_memo.profile.worker"]
        command += ["--device", device, "--out", str(path), *(["--check"] if check else [])]
        status, last = _run(command, flags, rank, world_size, output, tell)
        said.seek(0)
        text = said.read()
    if "done" in last:
        return last["done"]
    if "error" in last:
        raise ValueError(last["error"])
    refused = _argparse_error(text)
    if status == _MISTAKE and refused:
        raise ValueError(refused)
    end = "\n".join(text.splitlines()[-_LINES:])
    raise ProfileFailed(
        f"{end}\nmegatron-memo: rank {rank} failed with status {status}; the end of what Megatron "
        "said is above"
    )


def _run(
    command: list[str],
    flags: Sequence[str],
    rank: int,
    world_size: int,
    output: Any,
    tell: Callable[[str], None],
) -> tuple[int, dict[str, Any]]:
    """The worker's status and the last that it told."""
    reads, writes = os.pipe()
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "CUDA_VISIBLE_DEVICES": "",  # tensors without data need no GPU, and Megatron none
    }
    last: dict[str, Any] = {}
    with subprocess.Popen(
        [*command, "--say-to", str(writes), "--", *flags],
        env=env,
        stdout=output,
        stderr=output,
        pass_fds=[writes],
    ) as process:
        os.close(writes)
        try:
            with os.fdopen(reads) as lines:
                for line in lines:
                    last = json.loads(line)
                    if "at" in last:
                        tell(last["at"])
        except KeyboardInterrupt:
            process.terminate()
            raise
    return process.returncode, last


def _argparse_error(text: str) -> str:
    """What Megatron's parser says after its usage of several hundred lines."""
    found = [line for line in text.splitlines() if ": error: " in line]
    return found[-1].partition(": error: ")[2] if found else ""
