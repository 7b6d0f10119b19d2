"""What the commands that search have in common: their flags, signals and checks."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import native


def add_search_arguments(parser: argparse.ArgumentParser, result: str) -> None:
    """--time-limit, --workers, --seed and --deterministic of a search for a `result`."""
    parser.add_argument(
        "--time-limit",
        metavar="S",
        type=seconds,
        default=60.0,
        help="seconds of wall time to search (default 60)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=positive,
        default=None,
        help="threads that search at once (default: the cores this process may use, at most 4)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=whole_number, default=0, help="of random choices (default 0)"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help=f"one thread, and steps limited by work instead of time: the same {result} every "
        "time, unless the time limit cuts the search short",
    )


def worker_count(args: argparse.Namespace) -> int:
    """--workers or its default."""
    return args.workers or min(4, len(os.sched_getaffinity(0)))


def note_slow_solvers(command: str) -> None:
    """Says on stderr that there are no compiled solvers, and why."""
    if native.library() is None:
        print(
            f"{command}: note: slow Python solvers in use: {native.why_not()}",
            file=sys.stderr,
        )


def check_output(sources: Sequence[Path], target: Path) -> None:
    """Raises ValueError before a long search whose result couldn't be written."""
    if target.is_dir():
        raise ValueError(f"{target}: this is a folder, -o takes the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"{target}: the folder {target.parent} is not writable")
    if target.exists() and any(s.exists() and target.samefile(s) for s in sources):
        raise ValueError(f"{target}: -o names the input itself")


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM, as batch systems send it before they kill, acts like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handling({signal.SIGTERM: interrupt}):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect in the body, which takes seconds at most."""
    with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not in the main thread, where signals don't arrive anyway
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def whole_number(text: str) -> int:
    """An integer, as a type of argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def positive(text: str) -> int:
    """An integer from 1."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} s is not above 0")
    return value
