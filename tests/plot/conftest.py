"""A small plan with its trace, and costs that are quick to simulate."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.job import Job
from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.plan_file import Plan, digest_of, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.profile.trace import Trace, read_trace, write_trace

# What the command line of the same job says.
FLAGS = """
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
    --seq-length 32768 --max-position-embeddings 32768 --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 1 --bf16 --use-distributed-optimizer
    --tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4 --memo-swap-ratio 0.5
    --transformer-impl local --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion
"""


@dataclass(frozen=True)
class Planned:
    """A plan and its trace, and their files."""

    plan: Plan
    trace: Trace
    plan_file: Path
    trace_file: Path


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return planned_of(folder, Shape(5, chunks=2, micro_batches=2, unit=1 << 22), 1 << 20)


@pytest.fixture(scope="session")
def other_trace(tmp_path_factory):
    """A trace that the plan is not made of."""
    path = tmp_path_factory.mktemp("other") / "other.trace.jsonl"
    write_trace(path, training(Shape(2)))
    return path


def planned_of(folder, shape, smallest):
    trace_file, plan_file = folder / "it.trace.jsonl.gz", folder / "it.plan.jsonl"
    write_trace(trace_file, training(shape))
    trace = read_trace(trace_file)
    source = Source(trace_file.name, digest_of(trace_file), trace)
    search = Search(time_limit=20, workers=1, use_cp_sat=False)
    plan = make_plan([source], search, smallest=smallest).plan
    write_plan(plan_file, plan)
    return Planned(plan, trace, plan_file, trace_file)


@pytest.fixture(scope="session")
def costs():
    job = Job(
        layers=4,
        hidden=4096,
        ffn=16384,
        heads=32,
        head_dim=128,
        groups=32,
        vocabulary=50304,
        sequence=1 << 15,
        tp=2,
        sequence_parallel=True,
        distributed_optimizer=True,
    )
    return Costs(job, Machine(gpu("a800-80g"), gpus=2, host_memory=1 << 34))


@pytest.fixture(scope="session")
def flags():
    return FLAGS.split()
