"""Starts pretrain_gpt_memo.py under torchrun, shows how it goes, and reads what it measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt_memo.py"

# Megatron's progress line. Several ranks write to one log, so it may not start its line.
_ITERATION = re.compile(
    r"iteration +(?P<now>\d+)/ *(?P<all>\d+) \|.*?"
    r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*?lm loss: (?P<loss>[^ |]+)"
)
# torchrun's own account of a failed rank begins here; what the rank said itself stands above it.
_TORCHRUN_SUMMARY = re.compile(
    r"torch[./]distributed[./]elastic.*(closing signal|failed|Error)|ChildFailedError"
)


class LaunchError(RuntimeError):
    """A training run failed; the message holds the end of its log."""


@dataclass(frozen=True)
class Machine:
    """What a run is launched on: ``ranks`` processes, and Megatron flags that the device needs."""

    ranks: int
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    says: str = ""


def this_machine() -> Machine:
    """Two ranks on the CPU, or on as many GPUs as there are, two at most."""
    import torch

    if not torch.cuda.is_available():
        return Machine(2, (), says="2 ranks on the CPU, one thread each")
    ranks = min(torch.cuda.device_count(), 2)
    # Flash kernels of a GPU take 16-bit numbers only. One rank has nothing to share a layer with.
    flags = ("--bf16", *(() if ranks == 2 else ("--tensor-model-parallel-size", "1")))
    # Megatron asks for it where ranks share layers, on GPUs before Blackwell.
    environment = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    return Machine(ranks, flags, environment, f"{ranks} x {torch.cuda.get_device_name()}, bf16")


def command(machine: Machine, flags: Sequence[str], script: Path = SCRIPT) -> list[str]:
    """The command line of a run. ``--standalone`` takes a free port: two can run at once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(machine.ranks), str(script), *flags]


def _nothing() -> None:
    pass


def launch(
    machine: Machine,
    flags: Sequence[str],
    *,
    log: Path,
    report: Path,
    script: Path = SCRIPT,
    begun: Callable[[], None] = _nothing,
) -> dict[str, Any]:
    """Train, with a line for each iteration on stdout and everything else in ``log``.

    Args:
        flags: Megatron's and memo's, without ``--memo-report``, which is added for ``report``.
        begun: called once, when the first iteration is through.

    Returns:
        The report, as ``--memo-report`` wrote it.

    Raises:
        LaunchError: the run failed, or left no report.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    words = command(machine, [*flags, *machine.flags, "--memo-report", str(report)], script)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for name, value in machine.environment:
        environment.setdefault(name, value)
    start = time.monotonic()
    with open(log, "w", buffering=1) as file:
        file.write(shlex.join(words) + "\n")
        # A group of its own, so that a stop reaches the ranks whatever torchrun does about it.
        run = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        try:
            assert run.stdout is not None
            for line in run.stdout:
                file.write(line)
                shown = progress_line(line)
                if shown is not None:
                    print(f"    {shown}", flush=True)
                    begun()
                    begun = _nothing
            status = run.wait()
        except BaseException:
            _stop(run)
            raise
    if status != 0:
        raise LaunchError(
            f"The run failed with status {status} after {time.monotonic() - start:.0f} s. The end "
            f"of {log}:\n{tail(log)}"
        )
    if not report.exists():
        raise LaunchError(f"The run left no report at {report}. The end of {log}:\n{tail(log)}")
    return json.loads(report.read_text())


def stop_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: by an exception, so that its runs are ended too.

    Ctrl-C is put back to that as well: a shell's background job starts with it ignored.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def progress_line(line: str) -> str | None:
    """A line of Megatron's log as a short one, or None if it is not about an iteration."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    return (
        f"iteration {match['now']:>3}/{match['all']}   loss {float(match['loss']):.4f}   "
        f"{float(match['ms']) / 1000:.2f} s"
    )


def tail(log: Path, lines: int = 25) -> str:
    """The last lines that a failed run's ranks wrote, without torchrun's summary below them."""
    # The first line is the command, which the message need not repeat.
    written = log.read_text(errors="replace").splitlines()[1:]
    for number, line in enumerate(written):
        if _TORCHRUN_SUMMARY.search(line):
            # Torchrun alone has spoken if nothing stands above it.
            written = written[:number] or written
            break
    return "\n".join(f"  | {line}" for line in written[-lines:])


def _stop(run: subprocess.Popen[str]) -> None:
    """End a run's whole process group, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(run.pid, number)
            run.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
