"""Ranks of a training script as forks of one process that has imported torch and Megatron.

Those imports take four CPU seconds a rank, and torchrun itself two, which is more than most of the
runs that tests start. A rank gets what torchrun would give it: the environment, a rendezvous store
that it reaches over TCP, the script as ``__main__``, its own standard streams; when one fails, the
others are ended. Tests that are about a launch start torchrun itself.

NOTE: how a fork stays as good as a fresh process
  - The server runs no tensor operation and has one thread, so a fork is whole.
  - It imports what the launcher imports before it has read its arguments, in the launcher's order:
    the CPU platform, upstream's repairs, Megatron. Nothing there depends on a run.
  - Where there is a GPU, whose driver does not survive a fork, `run_ranks` starts torchrun.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# What pretrain_gpt_memo.py and the workers of tests/layer and tests/ops import.
PRELOADED = (
    "megatron.training",
    "megatron.training.arguments",
    "megatron.training.argument_utils",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.tokenizers.text",  # with transformers
    "megatron.core.models.mimo",
    "megatron_memo.layer.spec",
    "megatron_memo.training.auto_setup",
    "megatron_memo.training.checks",
    "megatron_memo.training.datasets",
    "megatron_memo.training.gpt",
    "megatron_memo.training.main",
    "megatron_memo.training.report",
    "torch._dynamo.variables.memory",
)
_TIMED_OUT = "timed out"
_POLL_MS = 20


def run_ranks(
    count: int, script: str | Path, words: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``count`` ranks from the folder ``/``, with this process's environment.

    Returns:
        status 0, or that of the first rank that failed (-N where signal N ended it), and what all
        ranks have printed.

    Raises:
        subprocess.TimeoutExpired: not done after ``timeout`` seconds; the ranks are ended.
    """
    from megatron_memo import platform

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(script), *map(str, words)]
    if not platform.is_active():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.run(
            [*torchrun, "--nproc-per-node", str(count), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            cwd="/",
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        status = _server().ask(
            count=count, command=command, env=env, timeout=timeout, out=str(out), err=str(err)
        )
        said = [file.read_text(errors="replace") for file in (out, err)]
    if status == _TIMED_OUT:
        raise subprocess.TimeoutExpired(command, timeout, *said)
    return subprocess.CompletedProcess(command, status, *said)


class _Server:
    """The other end of `serve`: a process that lives as long as this one."""

    def __init__(self) -> None:
        replies, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            pass_fds=[write],
        )
        os.close(write)
        self._replies = os.fdopen(replies)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._replies.readline()
        assert reply, f"the server of ranks has ended: {self._process.wait()}"
        return json.loads(reply)


_server = cache(_Server)


def serve(requests: IO[bytes], replies: int) -> None:
    """Answer each line of ``requests`` with a line: the status of its ranks.

    Returns in the server, when the requests end, and raises SystemExit in a rank, when it ends.
    """
    from megatron_memo import compat, platform

    platform.activate()
    compat.install_import_hooks()
    for name in PRELOADED:
        importlib.import_module(name)
    # Collecting would write into every page that the ranks share with this process.
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    while line := requests.readline():
        request = json.loads(line)
        started = _start(request)
        if started is None:
            os.close(replies)
            _be_rank(request)
        status = _wait(started, time.monotonic() + request["timeout"], requests)
        os.write(replies, f"{json.dumps(status)}\n".encode())


def _start(request: dict[str, Any]) -> list[int] | None:
    """Process ids of the ranks and of their store; None in a rank."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [os.open(request[name], flags, 0o600) for name in ("out", "err")]
    store = socket.create_server(("127.0.0.1", 0))
    request["env"] |= {
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(request["count"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.getsockname()[1]),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(request["count"]),
    }
    started: list[int] = []
    for rank in range(request["count"]):
        pid = os.fork()
        if pid == 0:
            store.close()
            request["env"] |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _take_streams(streams)
            return None
        started.append(pid)
    pid = os.fork()
    if pid == 0:
        _take_streams(streams)
        _be_store(store)
    started.append(pid)
    store.close()
    for stream in streams:
        os.close(stream)
    return started


def _take_streams(streams: list[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([nothing, *streams]):
        os.dup2(stream, number)
        os.close(stream)


def _be_store(listening: socket.socket) -> None:
    """Hold the ranks' rendezvous store until the server ends this process."""
    from torch.distributed import TCPStore

    address, port = listening.getsockname()
    held = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    while held:
        time.sleep(3600)


def _be_rank(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir("/")
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


def _wait(started: list[int], deadline: float, requests: IO[bytes]) -> int | str:
    """Status of the first rank that failed, or 0; no process of ``started`` is left."""
    *waiting, store = started
    status: int | str = 0
    asking = select.poll()
    asking.register(requests, 0)  # hang-up only
    while waiting and not status:
        for pid in list(waiting):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                waiting.remove(pid)
                status = status or os.waitstatus_to_exitcode(how)
        if time.monotonic() > deadline:
            status = _TIMED_OUT
        if asking.poll(_POLL_MS):
            status = _TIMED_OUT  # whoever asked has gone
    _end(waiting, signal.SIGTERM if status != _TIMED_OUT else signal.SIGKILL)
    _end([store], signal.SIGKILL)
    return status


def _end(processes: list[int], how: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, how)
    patience = threading.Timer(10, lambda: [os.kill(pid, signal.SIGKILL) for pid in processes])
    patience.start()
    for pid in list(processes):
        os.waitpid(pid, 0)
        processes.remove(pid)
    patience.cancel()
    patience.join()


if __name__ == "__main__":
    serve(sys.stdin.buffer, int(sys.argv[1]))
