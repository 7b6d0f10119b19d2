#!/usr/bin/env python3
"""Profiles, plans, verifies and estimates every config: a table, kept as CSV.

    python benchmarks/configs.py --csv benchmarks/results/configs.csv

A config whose row in the CSV was made of the config's present content (`digest`) is left as it is;
name configs to measure them again. No GPU is needed: profiles are of tensors without data.

Traced is the first rank of each pipeline stage, with the swap ratio that the estimate takes for
`auto`. More micro-batches than there are stages need no more memory, so no more are traced
(`micro_batches`). Each trace is planned and the plan verified against it; a row
tells of the rank that needs most. `peak_gib` is what the trace has alive at once, with what is
held between iterations; `arithmetic_gib` is what the estimate without a profile says instead.
`native` and `expandable` are what PyTorch's allocator would reserve for the planned requests, by
simulation, as a ratio to `bound_gib`, the proven least. Step and MFU are the estimate's, for
A800s with 80 GB: predictions, and nothing of them was measured on a GPU. The quickstart's config is
for CPUs, whose speed no datasheet tells.
"""

from __future__ import annotations

import argparse
import csv
import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.config import Config, read_config
from lib.launch import ROOT
from lib.prediction import CPU_RATIO, RATIO, chosen_ratio, digest_of, is_auto, predict
from megatron_memo.estimate.flags import read_run, with_flag
from megatron_memo.estimate.parts import peak_of
from megatron_memo.plan.atomic_file import whole_file
from megatron_memo.plan.plan_file import digest_of as digest_of_file
from megatron_memo.plan.plan_file import read_plan, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.savings import savings_of
from megatron_memo.plan.verify_plan import verify_against, verify_plan
from megatron_memo.profile.process import ProfileFailed, profile_rank
from megatron_memo.profile.trace import read_trace

GIB = 1 << 30
COLUMNS = (
    *("config", "digest", "ranks", "traced", "micro_batches", "ratio", "events"),
    *("profile_seconds", "peak_gib", "host_gib", "arena_gib", "bound_gib", "gap_bytes"),
    *("native", "expandable", "plan_seconds", "verified", "arithmetic_gib"),
    *("step_seconds", "mfu_full", "mfu_causal"),
)
Row = dict[str, object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path, help="default: those without a row")
    parser.add_argument("--csv", type=Path, required=True, help="read, and written after each row")
    parser.add_argument("--time-limit", type=float, default=30, help="seconds a plan (default 30)")
    parser.add_argument("--workers", type=int, default=2, help="threads of a search (default 2)")
    args = parser.parse_args()
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    rows = rows_of(args.csv)
    search = Search(args.time_limit, args.workers)
    print(*COLUMNS, sep="\t")
    status = 0
    for path in args.configs or paths:
        config = read_config(path)
        known = rows.pop(path.stem, None)
        if args.configs or known is None or known["digest"] != digest_of(config):
            try:
                known = measure(config, search)
            except (ValueError, ProfileFailed) as failed:
                print(f"{path}: {failed}", file=sys.stderr)
                status = 1
                continue
            print(*known.values(), sep="\t", flush=True)
        rows[path.stem] = known
        write(args.csv, [rows[p.stem] for p in paths if p.stem in rows], search)
    return status


def rows_of(path: Path) -> dict[str, Row]:
    """A table's rows by config; none where there is no file."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {str(row["config"]): dict(row) for row in csv.DictReader(lines)}


def write(path: Path, rows: Iterable[Row], search: Search) -> None:
    with whole_file(path) as file:
        file.write(f"# python benchmarks/configs.py --time-limit {search.time_limit:g} ")
        file.write(f"--workers {search.workers}\n# seconds are of CPU for a profile, ")
        file.write("of wall time for a plan\n")
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def measure(config: Config, search: Search) -> Row:
    """The row of one config."""
    cpu = not is_auto(config)
    ratio = CPU_RATIO if cpu else chosen_ratio(config)
    words = with_flag(config.flags(), RATIO, str(ratio))
    ranks = config.nodes * config.ranks_per_node
    job = read_run(words, ranks).job
    micro_batches = min(job.micro_batches, job.pp)
    batch = micro_batches * job.micro_batch * job.dp
    words = [*with_flag(words, "--global-batch-size", str(batch)), "--mock-data"]
    traced = [stage * (ranks // job.pp) for stage in range(job.pp)]
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measure_rank(words, Path(folder), rank, ranks, "cpu" if cpu else "cuda", search)
            for rank in traced
        ]
    most = max(found, key=lambda row: float(str(row["peak_gib"])))
    row: Row = {
        "config": config.path.stem,
        "digest": digest_of(config),
        "ranks": ranks,
        "traced": " ".join(map(str, traced)),
        "micro_batches": micro_batches,
        "ratio": ratio,
        **most,
        "gap_bytes": max(int(str(one["gap_bytes"])) for one in found),
        "verified": len(found),
    }
    if not cpu:
        answer = predict(config, ratio).answer
        assert answer.fits, f"{config.path}: {'; '.join(answer.problems)}"
        row |= {
            "arithmetic_gib": f"{answer.peak.parts.total / GIB:.2f}",
            "step_seconds": f"{answer.result.seconds:.1f}",
            "mfu_full": f"{answer.result.mfu_full:.3f}",
            "mfu_causal": f"{answer.result.mfu_causal:.3f}",
        }
    return {name: row.get(name, "") for name in COLUMNS}


def measure_rank(
    words: list[str], folder: Path, rank: int, ranks: int, device: str, search: Search
) -> Row:
    """Profile, plan and verification of one rank."""
    trace_path, plan_path = folder / f"{rank}.trace.jsonl.gz", folder / f"{rank}.plan.jsonl"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    profile_rank(words, trace_path, rank=rank, world_size=ranks, device=device)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    trace, digest = read_trace(trace_path), digest_of_file(trace_path)
    planned = make_plan([Source(trace_path.name, digest, trace)], search)
    write_plan(plan_path, planned.plan)
    plan = read_plan(plan_path)
    verify_plan(plan)
    verify_against(plan, trace, digest)
    savings = savings_of(planned.requests)
    peak = peak_of(trace)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "events": len(trace.events),
        "profile_seconds": round(cpu, 1),
        "peak_gib": f"{peak.parts.total / GIB:.4g}",
        "host_gib": f"{peak.host_bytes / GIB:.4g}",
        "arena_gib": f"{plan.arena / GIB:.4g}",
        "bound_gib": f"{plan.bound / GIB:.4g}",
        "gap_bytes": plan.gap,
        "native": f"{savings.native / plan.bound:.3f}",
        "expandable": f"{savings.expandable / plan.bound:.3f}",
        "plan_seconds": round(planned.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
