#!/usr/bin/env python3
"""Profiles layers and pipelines of every kind that `megatron-memo estimate` knows, for its tests.

    python benchmarks/profile_kinds.py [--only KIND ...] [--csv OUT.csv]

Small models of the shapes of Qwen3-MoE, DeepSeek-V2-Lite and DeepSeek-V3, and pipelines whose
stages have different numbers of layers. Bytes of one rank: `peak` and `held` as in
`profile_models`, `host` of what is swapped. Nothing is measured in seconds, so any machine gives
the same table.
tests/estimate/test_kinds.py holds the estimate's arithmetic to it.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_memo.profile.process import profile_rank
from megatron_memo.profile.trace import read_trace
from megatron_memo.profile.words import EVEN_EXPERTS

COLUMNS = ("kind", "rank", "peak", "held", "host")
TP = 8


@dataclass(frozen=True)
class Kind:
    """A command line, and which of its ranks are profiled.

    Attributes:
        flags: Megatron's and memo's.
        pp: pipeline stages; the first rank of each is profiled.
    """

    flags: str
    pp: int = 1

    @property
    def words(self) -> list[str]:
        return f"{_COMMON} --pipeline-model-parallel-size {self.pp} {self.flags}".split()

    @property
    def world_size(self) -> int:
        return TP * self.pp


_COMMON = f"""
    --transformer-impl local --hidden-size 2048 --seq-length 262144 --position-embedding-type rope
    --max-position-embeddings 262144 --micro-batch-size 1 --bf16 --use-distributed-optimizer
    --tensor-model-parallel-size {TP} --sequence-parallel --attention-dropout 0 --hidden-dropout 0
    --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 32000 --no-rope-fusion
    --no-masked-softmax-fusion --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
"""
_DENSE = "--num-attention-heads 16 --ffn-hidden-size 6144 --global-batch-size 3"
_LATENT = """
    --multi-latent-attention --num-attention-heads 16 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --ffn-hidden-size 10944
"""
_LATENT_QUERIES = f"{_LATENT} --q-lora-rank 1536 --qk-layernorm"
_EXPERTS = f"""
    --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 8
    --qk-layernorm --ffn-hidden-size 6144 --num-experts 32 --moe-router-topk 8
    --moe-ffn-hidden-size 768 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --moe-aux-loss-coeff 1e-3 {" ".join(EVEN_EXPERTS)}
"""
_BOTH = f"""
    {_LATENT} --num-experts 16 --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-layer-freq ([0]+[1]*5)
    --moe-aux-loss-coeff 1e-3 {" ".join(EVEN_EXPERTS)}
"""
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_ONE = "--num-layers 6 --global-batch-size 1"


def _memo(ratio: float, resident: int = 0) -> str:
    return f"--memo-swap-ratio {ratio} --memo-resident-layers {resident}"


KINDS = {
    "first and last stage": Kind(
        f"{_DENSE} --num-layers 12 --decoder-first-pipeline-num-layers 2 "
        f"--decoder-last-pipeline-num-layers 4 {_memo(0.5)}",
        pp=3,
    ),
    "layout": Kind(
        f"{_DENSE} --num-layers 12 --pipeline-model-parallel-layout Et*3|t*6|t*3L {_memo(0.5)}",
        pp=3,
    ),
    "layout, stock": Kind(
        f"{_DENSE} --num-layers 12 --pipeline-model-parallel-layout Et*3|t*6|t*3L", pp=3
    ),
    "latent, stock": Kind(f"{_ONE} {_LATENT}"),
    "latent, recompute": Kind(f"{_ONE} {_LATENT} {_FULL}"),
    "latent 0": Kind(f"{_ONE} {_LATENT} {_memo(0)}"),
    "latent 0.5": Kind(f"{_ONE} {_LATENT} {_memo(0.5)}"),
    "latent 1": Kind(f"{_ONE} {_LATENT} {_memo(1)}"),
    "latent 0.5, resident": Kind(f"{_ONE} {_LATENT} {_memo(0.5, 2)}"),
    "latent queries, stock": Kind(f"{_ONE} {_LATENT_QUERIES}"),
    "latent queries 0.5": Kind(f"{_ONE} {_LATENT_QUERIES} {_memo(0.5)}"),
    "experts, stock": Kind(f"{_ONE} {_EXPERTS}"),
    "experts, recompute": Kind(f"{_ONE} {_EXPERTS} {_FULL}"),
    "experts 0": Kind(f"{_ONE} {_EXPERTS} {_memo(0)}"),
    "experts 1": Kind(f"{_ONE} {_EXPERTS} {_memo(1)}"),
    "experts 0.5, resident": Kind(f"{_ONE} {_EXPERTS} {_memo(0.5, 2)}"),
    "experts recomputed 0.5": Kind(f"{_ONE} {_EXPERTS} {_memo(0.5)} --memo-moe-experts recompute"),
    "experts kept 0.5": Kind(f"{_ONE} {_EXPERTS} {_memo(0.5)} --memo-moe-experts keep"),
    "both, stock": Kind(f"{_ONE} {_BOTH}"),
    "both 0.5": Kind(f"{_ONE} {_BOTH} {_memo(0.5)}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(KINDS), help="kinds; default: all")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in KINDS]
    if unknown:
        parser.error(f"{unknown[0]}: not one of {'; '.join(KINDS)}")
    print(*COLUMNS, sep="\t")
    rows = []
    for name in args.only:
        for stage in range(KINDS[name].pp):
            rows.append(measure(name, stage * TP))
            print(*rows[-1].values(), sep="\t", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
    return 0


def measure(name: str, rank: int) -> dict[str, object]:
    """Profiles one rank; a row of the table."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank.trace.jsonl"
        found = profile_rank(kind.words, path, rank=rank, world_size=kind.world_size, device="cuda")
        trace = read_trace(path)
    held = sum(block.size for block in trace.held)
    values = (name, rank, trace.peak(), held, found["host_bytes"])
    return dict(zip(COLUMNS, values, strict=True))


if __name__ == "__main__":
    sys.exit(main())
