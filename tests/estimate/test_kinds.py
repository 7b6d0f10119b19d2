"""Estimates of latent attention, mixtures of experts and uneven pipelines, against profiles."""

import csv
import sys
from pathlib import Path

import pytest

from megatron_memo.estimate import memory
from megatron_memo.estimate.answer import answer, settings_of
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import memo_strategy, read_run
from megatron_memo.estimate.hardware import GIB, TIB, Machine, gpu
from megatron_memo.estimate.profiled import with_even_experts
from megatron_memo.estimate.strategies import Memo, Stock
from megatron_memo.estimate.table import notes, way_words
from megatron_memo.estimate.timeline import simulate
from megatron_memo.profile.words import EVEN_EXPERTS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.profile_kinds import KINDS, TP  # noqa: E402

TOLERANCE = 0.01  # of a profile's peak
HOST_ABOVE = 0.002  # of what is moved: statistics of norms, and what a router keeps
# Megatron's own recompute leaves tensors of each mixture behind until its next forward.
TOO_LITTLE = {"experts, recompute": 0.14}


def profiled():
    with (ROOT / "benchmarks" / "results" / "profile_kinds.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def run_of(kind):
    return read_run(KINDS[kind].words, KINDS[kind].world_size)


@pytest.mark.parametrize("row", profiled(), ids=lambda row: f"{row['kind']}-{row['rank']}")
def test_every_kinds_peak_is_met(row):
    run, stage = run_of(row["kind"]), int(row["rank"]) // TP
    if run.memo is None:
        way = memory.full_recompute if run.strategy.name == "full recompute" else memory.stock
        peak = way(run.job, stage=stage)
    else:
        memo = memo_strategy(run.job, run.memo, run.loss_chunks, 80 * GIB).of(run.job)
        peak = memory.memo(run.job, settings_of(memo), memo.loss, depth=memo.depth, stage=stage)
    profile = int(row["peak"]) + int(row["held"])
    below = TOO_LITTLE.get(row["kind"], TOLERANCE)
    assert (1 - below) * profile <= peak.parts.total <= (1 + TOLERANCE) * profile
    assert peak.host_bytes == pytest.approx(int(row["host"]), rel=HOST_ABOVE)


@pytest.mark.parametrize(
    ("kind", "least"), [("both 0.5", 0.3), ("experts recomputed 0.5", 0.3), ("latent 0.5", 0.3)]
)
def test_every_kind_has_a_step_time(kind, least):
    run = run_of(kind)
    costs = Costs(run.job, Machine(gpu("h100-80g"), gpus=8, host_memory=2 * TIB))
    memo = memo_strategy(run.job, run.memo, run.loss_chunks, 80 * GIB)
    result = simulate(costs, memo)
    assert least < result.mfu_full < 1
    assert result.stages[0].moved_out == pytest.approx(
        memory.memo(run.job, settings_of(memo), memo.loss).host_bytes, rel=0.01
    )
    again = result.stages[0].events
    assert any(event.name == "experts again" for event in again) == ("recomputed" in kind)


def test_what_experts_save_leaves_and_comes_back_as_their_policy_says():
    def moved(policy):
        words = [*KINDS["experts 0"].words, "--memo-moe-experts", policy]
        run = read_run(words, TP)
        memo = memo_strategy(run.job, run.memo, run.loss_chunks, 80 * GIB)
        costs = Costs(run.job, Machine(gpu("a800-80g"), gpus=8, host_memory=2 * TIB))
        stage = simulate(costs, memo).stages[0]
        return stage.moved_out, stage.seconds

    kept, recomputed, swapped = (moved(policy) for policy in ("keep", "recompute", "swap"))
    assert kept[0] < recomputed[0] < swapped[0]
    assert kept[1] < recomputed[1]


def test_a_profile_of_experts_has_as_many_tokens_for_each():
    asked = ["--num-experts", "8", "--moe-grouped-gemm", "--moe-token-dispatcher-type=allgather"]
    words = with_even_experts(asked)
    assert words[:2] == ["--num-experts", "8"] and "--moe-grouped-gemm" not in words
    assert " ".join(EVEN_EXPERTS) in " ".join(words)
    assert "--moe-token-dispatcher-type=allgather" not in words
    padded = [*EVEN_EXPERTS[:3], "2", "--moe-pad-expert-input-to-capacity"]
    assert with_even_experts(padded) == padded


def test_the_table_says_what_it_takes_for_granted():
    run = run_of("both 0.5")
    costs = Costs(run.job, Machine(gpu("a800-80g"), gpus=8, host_memory=2 * TIB))
    own = answer(costs, Stock())
    frugal = answer(costs, Memo(ratio=0.5, resident=0))
    said = "\n".join(notes([own, frugal], own, run.job, GIB, costs.machine))
    assert "experts are taken to get as many tokens each" in said
    assert "memo 0.5 is with --memo-resident-layers 0: with its defaults it would not fit" in said
    assert "would not fit" not in "\n".join(
        notes([own, frugal], frugal, run.job, GIB, costs.machine)
    )
    assert way_words(frugal) == "memo 0.5, resident 0" and way_words(own) == "stock"
