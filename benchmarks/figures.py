#!/usr/bin/env python3
"""Draws the figures of docs/figures/ again: a plan of the 7B model, and what the estimate says.

    python benchmarks/figures.py [KIND ...] [-o docs/figures]

Layout and memory are of configs/gpt-7b-1m.yaml at swap ratio 0.4, profiled and planned first;
pareto and curve are of the same model, streams of configs/gpt-7b-256k.yaml at the same ratio, where
a layer's copies are long enough to be seen. Nothing of it needs a GPU, and nothing of it was
measured on one. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from lib.config import read_config
from megatron_memo.cli import main as megatron_memo

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("layout", "memory", "streams", "pareto", "curve")
THEMES = ("light", "dark")
OF_A_PLAN = ("layout", "memory")
MODELS = {"streams": "gpt-7b-256k"}  # others: gpt-7b-1m
MORE = {"curve": ["--lengths", "64K..4M"]}
CHANGES = ("--memo-swap-ratio", "0.4", "--global-batch-size", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "figures")
    args = parser.parse_args()
    kinds = args.kinds or KINDS
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"{unknown[0]}: not one of {', '.join(KINDS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in kinds:
            inputs = _plan(Path(scratch)) if kind in OF_A_PLAN else ["--", *_flags(kind)]
            more = MORE.get(kind, [])
            for theme in THEMES:
                target = args.output / f"{kind}-{theme}.png"
                _run("plot", kind, "-o", str(target), "--theme", theme, *more, *inputs)
    return 0


def _flags(kind: str) -> list[str]:
    path = ROOT / "configs" / f"{MODELS.get(kind, 'gpt-7b-1m')}.yaml"
    return read_config(path).flags(CHANGES)


def _plan(folder: Path) -> list[str]:
    """A plan of the first rank, made if it is not there yet."""
    trace, plan = folder / "rank-0.trace.jsonl.gz", folder / "rank-0.plan.jsonl"
    if not plan.exists():
        _run("profile", "--rank", "0", "--world-size", "8", "-o", str(folder), "--", *_flags(""))
        _run("plan", str(trace), "-o", str(plan))
    return [str(plan)]


def _run(*words: str) -> None:
    status = megatron_memo(words)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
