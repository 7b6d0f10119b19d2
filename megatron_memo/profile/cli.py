"""``megatron-memo profile -- FLAGS``: what a training run asks of each GPU, without one."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_memo.exit_status import Exit
from megatron_memo.profile.process import ProfileFailed, profile_rank

UNKNOWN_HINT = " (the training run's flags go after --)"
HELP = "Trace every request for memory of a training run's iteration, on a machine without a GPU."

DEVICES = ("cuda", "cpu")
_EXAMPLE = """\
examples: one trace a kind of rank of the 7B model of the MEMO paper at 1M tokens, into ./traces

  megatron-memo profile -o traces -- --transformer-impl local \\
      --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32 \\
      --seq-length 1048576 --max-position-embeddings 1048576 --position-embedding-type rope \\
      --micro-batch-size 1 --global-batch-size 1 --bf16 --use-distributed-optimizer \\
      --tensor-model-parallel-size 8 --sequence-parallel --attention-dropout 0 \\
      --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4 --memo-swap-ratio 0.3

The flags after -- are those of the training run, memo's with them. Megatron checks them, builds the
model, DDP and the optimizer and runs its own schedule and step, on tensors that have shapes and no
data, so that any size fits on a laptop. Data and checkpoints are not read and need not exist; a
tokenizer is, as it decides the size of the vocabulary. Attention shows torch's own flash kernel,
not the flash-attn package's; whether apex is installed counts, so have it as on the GPUs.
Settings that follow the GPU's memory take 80 GiB, or what --memo-device-budget says.
Workspaces inside of kernels are added by formula, under names that begin with "workspace:".

Ranks that ask for the same share one trace: by default one is made for each pipeline stage, for the
first and the other ranks of a tensor-parallel group, and for each different share of a distributed
optimizer. Files are named rank-N.trace.jsonl.gz; megatron_memo/profile/trace.py describes them.

Exit status: 0, 2 after a mistake in the command line, 1 if Megatron failed, 130 after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-memo profile [options] -- MEGATRON-FLAGS"
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "--rank",
        metavar="N|all",
        help="the rank to profile, or every one. Default: one of each kind",
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        help="ranks of the training run. Default: as many as the parallel sizes need",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cuda",
        help="whose kernels and allocator are asked about (default: cuda)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", default=".", help="where traces go (default: here)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run a third iteration and fail unless it asks for the same as the second",
    )
    parser.add_argument("--verbose", action="store_true", help="show Megatron's own messages")
    parser.add_argument("flags", nargs="*", metavar="MEGATRON-FLAGS", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Profile as asked; returns the exit status.

    Raises:
        ValueError: a mistake of the user's.
    """
    if not args.flags:
        raise ValueError(
            "no flags of a training run: put them after --, as in megatron-memo profile -- "
            "--num-layers 32 ... (--help has a whole example)"
        )
    world_size = _world_size(args)
    rank = _rank(args.rank, world_size)
    folder = Path(args.output)
    _check_folder(folder)
    job = _Job(args, world_size, folder)
    try:
        if rank is not None:
            job.profile(rank)
        elif args.rank == "all":
            for each in range(world_size):
                job.profile(each)
        else:
            _profile_kinds(job)
    except KeyboardInterrupt:
        _progress("")
        print("megatron-memo: interrupted; traces named above are whole", file=sys.stderr)
        return Exit.INTERRUPTED
    return 0


def _profile_kinds(job: _Job) -> None:
    """One rank of each kind."""
    # Rank 0 tells who is like it, and where other stages begin; their first ranks tell the rest.
    waiting, done = [0], set()
    while waiting:
        first = waiting.pop(0)
        found = job.profile(first)
        done.update(found["own"])
        more = [group[0] for group in found["alike"]] + list(found["stage_starts"])
        waiting += [r for r in more if r not in done and r not in waiting]


@dataclass
class _Job:
    """One command, many ranks."""

    args: argparse.Namespace
    world_size: int
    folder: Path

    def profile(self, rank: int) -> dict[str, Any]:
        """Profiles a rank in a process of its own; what it found.

        Raises:
            ValueError: a mistake in the flags.
            SystemExit: status 1; Megatron failed, and what it said has been shown.
        """
        path = self.folder / f"rank-{rank}.trace.jsonl.gz"
        try:
            found = profile_rank(
                self.args.flags,
                path,
                rank=rank,
                world_size=self.world_size,
                device=self.args.device,
                check=self.args.check,
                show=self.args.verbose,
                tell=lambda at: _progress(f"rank {rank} of {self.world_size}: {at}"),
            )
        except ProfileFailed as failed:
            _progress("")
            print(failed, file=sys.stderr)
            raise SystemExit(Exit.NO) from None
        finally:
            _progress("")
        print(_summary(rank, found, path, self.world_size), flush=True)
        return found


def _progress(words: str) -> None:
    """One line that the next one overwrites, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def _summary(rank: int, found: dict[str, Any], path: Path, world_size: int) -> str:
    own = found["own"]
    alike = f", and {len(own) - 1} ranks like it" if len(own) > 1 else ""
    peaks = ", ".join(f"{part} {_gib(size)}" for part, size in found["peaks"].items())
    host = f", host {_gib(found['host_bytes'])}" if found["host_bytes"] else ""
    return (
        f"rank {rank} of {world_size} (stage {found['stage']}{alike}): {found['events']} events, "
        f"peak {_gib(found['peak'])} ({peaks}) above {_gib(found['held'])} held{host}; "
        f"{found['kinds']}; {found['seconds']:.0f} s -> {path}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size / 2**10:.0f} KiB"


def _world_size(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags = {
        "--tensor-model-parallel-size": 1,
        "--pipeline-model-parallel-size": 1,
        "--context-parallel-size": 1,
    }
    for flag in flags:
        parser.add_argument(flag)
    given, _ = parser.parse_known_args(args.flags)
    product = 1
    for flag in flags:
        text = getattr(given, flag[2:].replace("-", "_"))
        size = 1 if text is None else _whole(flag, text, at_least=1)
        product *= size
    if args.world_size is None:
        return product
    world_size = _whole("--world-size", args.world_size, at_least=1)
    if world_size % product:
        raise ValueError(
            f"--world-size {world_size}: does not divide by {product}, the ranks that tensor, "
            f"pipeline and context parallelism need together. Give a multiple of {product}, such "
            f"as {(world_size // product + 1) * product}."
        )
    return world_size


def _rank(text: str | None, world_size: int) -> int | None:
    if text is None or text == "all":
        return None
    rank = _whole("--rank", text, at_least=0)
    if rank >= world_size:
        raise ValueError(
            f"--rank {rank}: the run has {world_size} ranks. Give 0 to {world_size - 1}, or all."
        )
    return rank


def _whole(flag: str, text: str, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise ValueError(f"{flag} {text}: must be a whole number, {at_least} or more")
    return value


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {folder}: cannot be made a folder ({error.strerror}). Give another place."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--output {folder}: cannot be written to. Give another folder.")
