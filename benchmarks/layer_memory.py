#!/usr/bin/env python3
"""Peak memory of a block of layers: over chunks, ratios and prefetch depths; the longest sequence.

    python benchmarks/layer_memory.py                   on tensors without data, at any size
    python benchmarks/layer_memory.py --device cpu --sequence 2048 --hidden 128 --ffn 344 \\
        --heads 4 --query-groups 4 --granule 128

Two tables, also written as CSV with the versions to benchmarks/results/. "Peak" is the most bytes
of live tensors above what is there between steps (parameters and their gradients), by storage
accounting. The first table gives memo's peak as a ratio to full recompute's. The second gives each
way the peak that full recompute has at --sequence tokens, and looks for the most tokens that fit,
in steps of --granule.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layer import FULL_RECOMPUTE, build  # noqa: E402
from ranks import peak_of, start_ranks  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_memo.config import MemoConfig, depth_from_text  # noqa: E402

Row = dict[str, Any]
KEEP_ALL = 1 << 30  # resident layers


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("meta", "cpu", "cuda"), default="meta")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--query-groups", type=int, default=32)
    parser.add_argument("--ffn", type=int, default=11008)
    parser.add_argument("--sequence", type=int, default=1 << 17, help="tokens (default: 131072)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--chunks-list", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depths", nargs="+", default=["4", "auto", "layers"])
    parser.add_argument("--longest-chunks", type=int, default=16)
    parser.add_argument("--longest-depth", default="4")
    parser.add_argument("--granule", type=int, default=1 << 13, help="tokens (default: 8192)")
    parser.add_argument("--resident-layers", type=int, default=0)
    parser.add_argument("--output", type=Path, help="CSV (default: benchmarks/results/...)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    start_ranks(options.device)
    memory = Memory(options)
    full = memory.peak("full recompute", options.sequence)
    peaks = list(chunk_rows(memory, options, full))
    print(chunk_table(peaks, options))
    longest = list(longest_rows(memory, options, full))
    print(longest_table(longest))
    path = options.output or ROOT / "benchmarks" / "results" / f"layer_memory_{options.device}.csv"
    write_csv(path, options, [*peaks, *longest])
    print(f"written: {path}")
    dist.destroy_process_group()


class Memory:
    """Peaks of one block of layers, run in any way.

    Args:
        options: the shape of the layers.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        keeping = MemoConfig(1.0, 1, KEEP_ALL)
        self._ours = build(options, keeping)
        self._upstream = {
            "stock": build(options, None),
            "full recompute": build(options, None, **FULL_RECOMPUTE),
        }
        for block in (self._ours, *self._upstream.values()):
            self._step(block, options.granule)  # makes .grad

    def peak(self, way: str | MemoConfig, tokens: int) -> int:
        """Bytes at most, of a step of `tokens` tokens."""
        if isinstance(way, str):
            block = self._upstream[way]
        else:
            block = self._ours
            for layer in block.layers:
                layer.memo = way
        return peak_of(lambda: self._step(block, tokens), self._options.device)

    def _step(self, block: Any, tokens: int) -> None:
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        options = self._options
        dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
        shape = (tokens, 1, options.hidden)
        x, grad = (torch.ones(shape, device=options.device, dtype=dtype) for _ in range(2))
        x.requires_grad_()
        rope = RotaryEmbedding(
            options.hidden // options.heads, 1.0, use_cpu_initialization=options.device == "cpu"
        )(tokens)
        block(hidden_states=x, attention_mask=None, rotary_pos_emb=rope).backward(grad)


def memo_of(options: argparse.Namespace, ratio: float, chunks: int, depth: str) -> MemoConfig:
    """Settings of which no number depends on how small the layers are."""
    return MemoConfig(
        ratio,
        chunks,
        options.resident_layers,
        min_swap_bytes=4096,
        prefetch_depth=depth_from_text(depth),
    )


def chunk_rows(memory: Memory, options: argparse.Namespace, full: int) -> Iterator[Row]:
    """A row for each ratio, depth and number of chunks."""
    cases = [
        (ratio, depth, chunks)
        for ratio in options.ratios
        for depth in options.depths
        for chunks in options.chunks_list
    ]
    for ratio, depth, chunks in tqdm(cases, desc="peaks", disable=dist.get_rank() != 0):
        peak = memory.peak(memo_of(options, ratio, chunks, depth), options.sequence)
        yield dict(
            table="peak", way="memo", ratio=ratio, depth=depth, chunks=chunks,
            tokens=options.sequence, peak_bytes=peak, to_full_recompute=round(peak / full, 4),
        )  # fmt: skip


def longest_rows(memory: Memory, options: argparse.Namespace, budget: int) -> Iterator[Row]:
    """A row for each way: the most tokens that fit into the budget."""
    ways: list[tuple[str, str | MemoConfig]] = [
        (name, name) for name in ("stock", "full recompute")
    ]
    ways += [
        ("memo", memo_of(options, ratio, options.longest_chunks, options.longest_depth))
        for ratio in options.ratios
    ]
    for name, way in tqdm(ways, desc="longest", disable=dist.get_rank() != 0):
        tokens = longest(
            lambda tokens, way=way: memory.peak(way, tokens),
            budget,
            start=options.sequence,
            granule=options.granule,
        )
        settings = dataclasses.asdict(way) if isinstance(way, MemoConfig) else {}
        yield dict(
            table="longest", way=name, ratio=settings.get("swap_ratio"),
            depth=settings.get("prefetch_depth"), chunks=settings.get("chunks"),
            tokens=tokens, peak_bytes=budget,
            to_full_recompute=round(tokens / options.sequence, 4),
        )  # fmt: skip


def longest(peak: Callable[[int], int], budget: int, *, start: int, granule: int) -> int:
    """The most tokens, a multiple of `granule`, whose peak is within the budget.

    The peak grows with the tokens about in proportion, so the next guess is the one that would
    fill the budget exactly, between what is known to fit and what is known not to.
    """
    fits, fails = 0, None
    guess = start
    while fails is None or fails - fits > granule:
        used = peak(guess)
        if used <= budget:
            fits = guess
        else:
            fails = guess
        guess = guess * budget // used // granule * granule
        guess = max(guess, fits + granule)
        if fails is not None:
            guess = min(guess, fails - granule)
    return fits


def chunk_table(rows: list[Row], options: argparse.Namespace) -> str:
    """Ratios and depths down, chunks across."""
    lines = [f"{'ratio':>6}{'depth':>8}" + "".join(f"{c:>8}" for c in options.chunks_list)]
    for ratio in options.ratios:
        for depth in options.depths:
            found = [r for r in rows if (r["ratio"], r["depth"]) == (ratio, depth)]
            cells = "".join(f"{row['to_full_recompute']:>8.3f}" for row in found)
            lines.append(f"{ratio:>6g}{depth:>8}{cells}")
    return "\n".join(["peak to full recompute's, by chunks", *lines])


def longest_table(rows: list[Row]) -> str:
    lines = [f"{'':20}{'tokens':>8}{'to full recompute':>20}"]
    for row in rows:
        name = row["way"] if row["ratio"] is None else f"{row['way']} {row['ratio']:g}"
        lines.append(f"{name:20}{row['tokens']:>8}{row['to_full_recompute']:>19.2f}x")
    return "\n".join(["longest sequence in full recompute's memory", *lines])


def write_csv(path: Path, options: argparse.Namespace, rows: list[Row]) -> None:
    """Both tables with, in comment lines, the command and the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    shape = {k: v for k, v in vars(options).items() if k != "output"}
    with open(path, "w", newline="") as file:
        command = " ".join(["python benchmarks/layer_memory.py", *sys.argv[1:]])
        file.write(f"# {command}\n# {options.device}; {versions}\n# {shape}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
