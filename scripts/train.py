#!/usr/bin/env python3
"""Starts a training run from a config: `scripts/train.py CONFIG [options] [Megatron's flags]`.

On one node it becomes torchrun; on several, run it on each with the same --rdzv; with --slurm it is
run by srun once for each rank and becomes that rank. Nothing is left between the launcher and the
ranks, so signals arrive where they should.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.config import Config, check_ranks, read_config
from lib.launch import SCRIPT

_EXAMPLES = """\
Flags after CONFIG that are none of these go to Megatron, and replace those of the config.

examples:
  scripts/train.py configs/gpt-7b-1m.yaml --data-path data/mine \\
      --save runs/7b --load runs/7b --save-interval 100
  scripts/train.py configs/gpt-7b-1m.yaml --mock-data --train-iters 5 --dry-run
  scripts/train.py configs/gpt-7b-1m.yaml --mock-data --memo-swap-ratio 0.4 --check
  on each of two nodes, of which the first is called alpha:
    scripts/train.py configs/gpt-13b-1m.yaml --rdzv alpha:29500 --data-path data/mine
  in a batch script of Slurm, see scripts/slurm/nodes.sbatch:
    srun scripts/train.py configs/gpt-13b-1m.yaml --slurm --data-path data/mine

Variables of the config's ENV_VARS that are set in your environment keep your value.
Exit status: that of the run, or 2 after a mistake in config or options."""

# What srun tells each of its tasks, and what torch.distributed reads.
_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_NTASKS",
}


@dataclass(frozen=True)
class Start:
    """A command and the variables that it needs on top of the environment.

    Attributes:
        flags: the end of `words`, which Megatron reads.
        ranks: of all nodes together.
    """

    words: list[str]
    environment: dict[str, str]
    flags: list[str]
    ranks: int

    def text(self) -> str:
        """One line that a shell runs alike."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


def start(
    config: Config, options: argparse.Namespace, extra: Sequence[str], env: Mapping[str, str]
) -> Start:
    """The command of a run.

    Args:
        config: the model.
        options: what `parser` gives.
        extra: flags for Megatron.
        env: the environment, whose values go before the config's.

    Raises:
        ValueError: options that do not fit one another, the config, or the machine.
    """
    nodes, per_node = options.nodes or config.nodes, options.ranks_per_node or config.ranks_per_node
    flags = config.flags(extra, options.without)
    environment = {k: v for k, v in config.environment.items() if k not in env}
    words = [sys.executable]
    if options.slurm:
        if options.rdzv or options.nodes or options.ranks_per_node:
            raise ValueError(
                "--slurm: takes nodes, ranks and addresses from srun. Give --nodes and "
                "--ntasks-per-node to sbatch, and drop --rdzv, --nodes and --ranks-per-node here."
            )
        environment |= _rank_of_slurm(env)
        ranks = int(environment["WORLD_SIZE"])
        check_ranks(config, ranks, flags)
    else:
        ranks = nodes * per_node
        check_ranks(config, ranks, flags)
        words += ["-m", "torch.distributed.run", *_rendezvous(nodes, options.rdzv)]
        words += ["--nproc-per-node", str(per_node)]
        # As torchrun sets it, which warns if nobody has.
        environment |= {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": "1"}
    return Start([*words, str(options.script), *flags], environment, flags, ranks)


def _rendezvous(nodes: int, address: str | None) -> list[str]:
    if nodes == 1:
        if address:
            raise ValueError(f"--rdzv {address}: is for several nodes, here is one. Drop it.")
        return ["--standalone"]  # takes a free port: two runs can share a machine
    if not address:
        raise ValueError(
            f"--nodes {nodes}: the nodes have to find each other. Run this on each of them with "
            "the same --rdzv HOST:PORT, HOST being one of them; or give --nodes 1."
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"--rdzv {address}: must be HOST:PORT, such as alpha:29500.")
    # Host and port alone tell two runs apart: the same two can't be taken twice.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    return ["--nnodes", str(nodes), *rendezvous, "--rdzv-id", f"memo-{port}"]


def _rank_of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in _FROM_SLURM.values() if name not in env]
    if missing:
        raise ValueError(
            f"--slurm: {missing[0]} is not set. Start this with srun, or drop --slurm."
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise ValueError(
                f"--slurm: {name} is not set, so the ranks cannot find each other. Export it in "
                "the batch script, as scripts/slurm/nodes.sbatch does."
            )
    return {name: env[source] for name, source in _FROM_SLURM.items()}


def parser() -> argparse.ArgumentParser:
    """The launcher's own options."""
    found = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py CONFIG [options] [Megatron's flags]",
        description="Starts a training run from a config (configs/README.md says what is there).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--nodes", metavar="N", type=_positive, help="default: the config's")
    found.add_argument(
        "--ranks-per-node", metavar="N", type=_positive, help="GPUs a node; default: the config's"
    )
    found.add_argument(
        "--rdzv", metavar="HOST:PORT", help="where several nodes meet, the same on each"
    )
    found.add_argument(
        "--slurm", action="store_true", help="be one rank of those that srun has started"
    )
    found.add_argument(
        "--without",
        metavar="FLAG",
        action="append",
        default=[],
        help="leave a flag of the config out (no-rope-fusion or --without=--no-rope-fusion)",
    )
    found.add_argument(
        "--script", metavar="FILE", type=Path, default=SCRIPT, help="default: pretrain_gpt_memo.py"
    )
    found.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command instead of running it; flags are not looked at",
    )
    found.add_argument(
        "--check",
        action="store_true",
        help="start nothing: parse the flags as the run will and name what is refused (some "
        "seconds; files are not looked at)",
    )
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Become the run; returns only with --dry-run or --check, or after a mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = parser()
    path = words.pop(0) if words and not words[0].startswith("-") else None
    options, extra = own.parse_known_args(words)
    if path is None:
        own.error("CONFIG is missing: give a file of configs/ first")
    try:
        run = start(read_config(Path(path)), options, extra, os.environ)
        if options.check:
            from lib.check import check_run  # Megatron takes seconds to import

            check_run(run.flags, run.ranks, run.environment)
    except ValueError as mistake:
        print(f"train.py: error: {mistake}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(run.text())
    elif options.check:
        print(f"{path}: the flags are right, for {run.ranks} ranks")
    if options.dry_run or options.check:
        return 0
    os.execvpe(run.words[0], run.words, {**os.environ, **run.environment})


if __name__ == "__main__":
    sys.exit(main())
