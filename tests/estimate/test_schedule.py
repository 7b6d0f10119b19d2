"""The generated order of work is the one that a profile of the real thing shows."""

import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_memo.estimate import schedule
from megatron_memo.estimate.job import Job
from megatron_memo.phases import LAYER
from megatron_memo.profile.trace import read_trace

TINY = Job(
    layers=4,
    hidden=64,
    ffn=256,
    heads=4,
    head_dim=16,
    groups=4,
    vocabulary=128,
    sequence=64,
    micro_batches=4,
    pp=2,
)
FLAGS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 63
    --transformer-impl local --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2
    --memo-swap-ratio 0.5 --memo-chunks 4 --memo-resident-layers 1
"""


def words(job, stage, chunks=None):
    """ "f0 f1 b0": passes with their model chunk, and the layers in each."""
    said = []
    for one in schedule.passes(job, stage, chunks):
        layers = [p.layer for p in one.phases if p.part == LAYER and p.chunk is None]
        said.append(f"{one.direction[:1]}{one.micro_batch}" + "".join(f"L{k}" for k in layers))
    return " ".join(said[:-1])


def test_an_interleaved_stage_is_that_of_a_profile(tmp_path):
    command = [sys.executable, "-m", "megatron_memo.cli", "profile", "--device", "cpu"]
    command += ["--rank", "1", "-o", str(tmp_path), "--", *FLAGS.split()]
    subprocess.run(command, check=True, capture_output=True)
    seen = schedule.passes_of_trace(read_trace(tmp_path / "rank-1.trace.jsonl.gz"))
    made = schedule.passes(replace(TINY, virtual=2), 1, chunks=4)
    assert [p for one in made for p in one.phases] == [p for one in seen for p in one.phases]
    assert [one for one in made if one.direction] == [one for one in seen if one.direction]
    assert schedule.chunks_of(seen) == 4


def test_the_first_stage_of_an_interleaved_pipeline_runs_ahead():
    # As seen in a profile of the other stage.
    seen = """f0L1 f1L1 f0L3 f1L3 f2L1 b0L3 f3L1 b1L3 f2L3 b0L1 f3L3 b1L1 b2L3 b3L3 b2L1 b3L1"""
    assert words(replace(TINY, virtual=2), 0) == seen


def test_the_plain_schedule_is_one_forward_one_backward():
    # As seen in profiles of two stages, of layers in one piece.
    first = "f0L1L2 f1L1L2 b0L2L1 f2L1L2 b1L2L1 f3L1L2 b2L2L1 b3L2L1"
    assert words(TINY, 0) == first
    assert words(TINY, 1) == " ".join(f"f{m}L3L4 b{m}L4L3" for m in range(4))
    alone = replace(TINY, pp=1, micro_batches=2)
    assert words(alone, 0) == "f0L1L2L3L4 b0L4L3L2L1 f1L1L2L3L4 b1L4L3L2L1"


@pytest.mark.parametrize(
    "layout",
    [
        dict(pp=4, micro_batches=2),
        dict(pp=4, micro_batches=8, virtual=2, layers=8),
        dict(pp=2, micro_batches=6, virtual=2, virtual_group=3),
        dict(pp=2, micro_batches=3, first_layers=1, last_layers=3),
    ],
)
def test_every_micro_batch_goes_once_forward_and_once_backward_through_every_layer(layout):
    job = replace(TINY, **layout)
    for stage in range(job.pp):
        own = [layer for v in range(job.virtual) for layer in job.layers_of(stage, v)]
        met = [
            (p.direction, p.micro_batch, p.layer)
            for one in schedule.passes(job, stage, None)
            for p in one.phases
            if p.part == LAYER
        ]
        assert len(met) == len(set(met)) == 2 * len(own) * job.micro_batches
        for micro_batch in range(job.micro_batches):
            for layer in own:
                there = met.index(("forward", micro_batch, layer))
                assert there < met.index(("backward", micro_batch, layer))
