"""What quickstart.sh does once there is an environment: data, a training run, the comparison.

Runs in the root of the repo, and keeps to ``data/`` and ``runs/quickstart/`` there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import compare
from lib.config import read_config
from lib.launch import (
    ROOT,
    LaunchError,
    Machine,
    launch,
    stop_on_sigterm,
    this_machine,
)
from megatron_memo.data.cli import main as prepare_data

CONFIG = Path("configs/quickstart.yaml")
FOLDER = Path("runs/quickstart")
RATIO = "0.5"

# Folders below the standard library that hold other projects, tests, or tables in Python's clothes.
NOT_PROGRAMS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
)


def prepare(seq_length: int) -> str:
    """The standard library's sources as a dataset, made once; returns its prefix.

    Its documents are sources of neighbouring modules joined to twice the context, so that most
    samples lie within one.

    Raises:
        LaunchError: it could not be made; the reason is on stderr.
    """
    prefix = f"data/python-{platform.python_version()}-{2 * seq_length}"
    words = ["--input", sysconfig.get_paths()["stdlib"], "--output-prefix", prefix]
    for folder in NOT_PROGRAMS:
        words += ["--exclude", folder]
    words += ["--suffix", ".py", "--document-tokens", str(2 * seq_length)]
    if prepare_data([*words, "--seq-length", str(seq_length), "--overwrite"]) != 0:
        raise LaunchError("The data could not be prepared.")
    return prefix


def train(machine: Machine, flags: Sequence[str], data_seconds: float) -> None:
    """Train with memo and check that the model learns.

    Args:
        flags: Megatron's, on top of the config's.
        data_seconds: that the data took before, for the time to the first iteration.

    Raises:
        LaunchError: the run failed, or its loss did not fall.
    """
    words = [*flags, "--memo-swap-ratio", RATIO]
    shown = ["scripts/train.py", str(CONFIG), "--ranks-per-node", str(machine.ranks)]
    print(f"    {shlex.join(shown)} \\\n        {shlex.join([*words, *machine.flags])}", flush=True)
    words = read_config(CONFIG).flags(words)
    install, began = float(os.environ.get("MEMO_INSTALL_SECONDS", "0")), time.monotonic()
    report = launch(
        machine,
        words,
        log=FOLDER / "train.log",
        report=FOLDER / "train.json",
        begun=lambda: print(
            first_iteration(install, data_seconds, time.monotonic() - began), flush=True
        ),
    )
    losses = [entry["lm_loss"] for entry in report["iterations"]]
    first, last = losses[0], losses[-1]
    if not last < first:
        raise LaunchError(
            f"The loss did not fall: {first:.4f} at first, {last:.4f} at last. The log is "
            f"{FOLDER / 'train.log'}."
        )
    print(f"The loss fell from {first:.4f} to {last:.4f} in {len(losses)} iterations.", flush=True)


def first_iteration(install: float, data: float, start: float) -> str:
    """What a newcomer waited for, in seconds."""
    return (
        f"First memo iteration after {install + data + start:.0f} s: environment {install:.0f}, "
        f"data {data:.0f}, start and iteration {start:.0f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Flags it does not know go to Megatron."""
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Makes the environment, trains a small Llama-style GPT on the sources of "
        "Python's standard library with memo, and compares memo with stock Megatron and with full "
        "recompute. Further flags are Megatron's and override those of configs/quickstart.yaml.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--iterations", type=int, default=20, help="Iterations of the training run (default 20)."
    )
    parser.add_argument(
        "--compare-iterations",
        type=int,
        default=4,
        help="Iterations of each run of the comparison, 3 or more (default 4); 0 leaves the "
        "comparison out.",
    )
    parser.add_argument(
        "--seq-length", type=int, default=8192, help="Tokens of context (default 8192)."
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.iterations < 4:
        parser.error(
            f"--iterations {arguments.iterations} is too small: it has to be at least 4, as the "
            "learning rate warms up for 3"
        )
    if arguments.compare_iterations not in (0, *range(3, 10000)):
        parser.error(
            f"--compare-iterations {arguments.compare_iterations} is too small: it has to be 0, "
            "or at least 3"
        )
    start = time.monotonic()
    os.chdir(ROOT)
    stop_on_sigterm()
    try:
        machine = this_machine()
        length = str(arguments.seq_length)
        print("== data: the sources of Python's standard library, as bytes", flush=True)
        began = time.monotonic()
        flags = ["--data-path", prepare(arguments.seq_length)]
        took = time.monotonic() - began
        flags += ["--seq-length", length, "--max-position-embeddings", length]
        print(f"== training with --memo-swap-ratio {RATIO}: {machine.says}", flush=True)
        train(machine, [*flags, "--train-iters", str(arguments.iterations), *rest], took)
        if arguments.compare_iterations:
            print("== comparison: the same model, trained in five ways", flush=True)
            iterations = arguments.compare_iterations
            words = read_config(CONFIG).flags([*flags, *rest])
            compare.run(machine, words, iterations=iterations, folder=FOLDER)
    except (LaunchError, ValueError, OSError) as error:
        print(f"{error}\nquickstart.sh: failed", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart.sh: stopped", file=sys.stderr)
        return 130
    seconds = round(time.monotonic() - start)
    print(
        f"quickstart.sh: all done in {seconds // 60} min {seconds % 60} s; logs and reports are "
        f"in {FOLDER}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
