"""Memory by arithmetic against profiles of the same flags, moment by moment."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_memo.config import MemoConfig
from megatron_memo.estimate import memory
from megatron_memo.estimate.hardware import GIB
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.memo_memory import MemoStage
from megatron_memo.estimate.strategies import Memo
from megatron_memo.estimate.tensors import Sizes
from megatron_memo.training.loss_head import loss_head

TOLERANCE = 0.01  # of a profile's peak
PROFILES = Path(__file__).parents[2] / "benchmarks" / "results" / "profile_models.csv"

SHAPES = {
    "7B": (32, 4096, 16384, 32),
    "13B": (40, 5120, 20480, 40),
    "30B": (48, 7168, 28672, 56),
    "65B": (80, 8192, 32768, 64),
}


def job_of(row, seven_b):
    pp = int(row["pp"])
    if row["model"] in SHAPES:
        layers, hidden, ffn, heads = SHAPES[row["model"]]
        shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "groups": heads}
        return replace(seven_b, **shape, pp=pp, micro_batches=pp)
    return replace(
        seven_b,
        layers=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        groups=8,
        vocabulary=129024,
        gated=True,
        biases=False,
        tied=False,
        pp=pp,
        micro_batches=pp,
    )


def chunks_of_head(job: Job) -> int | None:
    head = loss_head(
        None,
        tokens=job.tokens,
        local_tokens=job.local_tokens,
        vocabulary=job.vocabulary // job.tp,
        itemsize=job.element_bytes,
        device_bytes=80 * GIB,
    )
    return None if head is None else head.chunks


def profiled():
    with PROFILES.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return list(rows)


@pytest.mark.parametrize(
    "row", profiled(), ids=lambda row: f"{row['model']}-pp{row['pp']}-{row['rank']}"
)
def test_every_profile_of_the_papers_models_is_met(row, seven_b):
    job = job_of(row, seven_b)
    config, stage = MemoConfig(float(row["ratio"])), int(row["rank"]) // job.tp
    depth = Memo(config.swap_ratio, prefetch=config.prefetch_depth).of(job).depth
    peak = memory.memo(job, config, chunks_of_head(job), stage=stage, depth=depth)
    profile = (float(row["peak_gib"]) + float(row["held_gib"])) * GIB
    assert peak.parts.total == pytest.approx(profile, rel=TOLERANCE)


def test_a_layer_of_the_paper_keeps_16_units_and_rope_adds_its_rotated_copies(seven_b):
    job = replace(seven_b, rope=False)
    unit = job.unit_bytes
    plain, with_rope = Sizes.of(job, 1), Sizes.of(seven_b, 1)
    assert (plain.kept - plain.statistics) / unit == 16
    assert (with_rope.kept - with_rope.statistics) / unit == 16 + 2 + 1  # q, k; cosines and sines
    assert (plain.always - plain.statistics) / unit == 2
    assert plain.always + plain.others == plain.kept  # the input counts, not the output


def test_parts_are_of_the_weights_and_their_optimizer_by_the_book(seven_b):
    job = replace(seven_b, dp=4)
    parts = memory.stock(job).parts
    parameters = job.parameters(0)
    assert parts.weights == 2 * parameters and parts.gradients == 4 * parameters
    assert parts.optimizer == 12 * parameters // 4
    whole = memory.stock(replace(job, distributed_optimizer=False)).parts
    assert whole.optimizer == 12 * parameters


def test_memory_grows_with_what_is_kept(seven_b):
    def total(ratio, chunks=8, resident=2):
        return memory.memo(seven_b, MemoConfig(ratio, chunks, resident), 30).parts.total

    assert total(0.0) < total(0.5) < total(1.0)
    assert total(0.5, resident=0) < total(0.5, resident=2) < total(0.5, resident=8)
    assert total(0.5, chunks=32, resident=0) < total(0.5, chunks=2, resident=0)
    assert memory.full_recompute(seven_b).parts.total < memory.stock(seven_b).parts.total
    moved = ("attn_norm", "core_attn", "attn_proj")
    offload = memory.fine_grained(seven_b, moved)
    assert offload.parts.total < memory.stock(seven_b).parts.total and offload.host_bytes > 0


def test_host_memory_is_that_of_every_layer_that_swaps(seven_b):
    sizes = Sizes.of(seven_b, 1)
    peak = memory.memo(seven_b, MemoConfig(0.0, 8, 2), 30)
    assert peak.host_bytes == 30 * sizes.always
    peak = memory.memo(seven_b, MemoConfig(1.0, 8, 0), 30)
    assert peak.host_bytes == 32 * (sizes.always + sizes.others)


def test_the_embedding_works_in_the_loss_heads_chunks(seven_b):
    """Of a sequence that eight ranks share: gathered and copied whole, or a chunk of it beside a
    rank's own tokens, whose values Megatron clones."""

    def most(chunks):
        stage = MemoStage(seven_b, 0, MemoConfig(0.5, 8, 0), chunks)
        return max(moment.total for moment in stage.embedding(0))

    sizes = Sizes.of(seven_b, 1)
    assert sizes.whole == 8 * sizes.hidden
    assert most(None) == most(1) == 2 * sizes.whole
    assert most(4) == sizes.hidden + 2 * sizes.whole // 4
    assert most(30) == 2 * sizes.hidden
