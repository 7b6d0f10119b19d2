"""The batch scripts under a real Slurm with two nodes, to the end and through a requeue."""

import hashlib
import json
import sys

import pytest

from megatron_memo.platform import is_active
from tests.scripts.shell import ROOT
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(not is_active(), reason="runs on the CPU platform"),
    pytest.mark.timeout(3 * 600),
]
STEPS, SECONDS = 8, 600  # the latter to wait at most, on a busy machine
CONFIG = f"""
MODEL_ARGS:
  --num-layers: 3
  --hidden-size: 32
  --ffn-hidden-size: 256
  --num-attention-heads: 4
  --seq-length: 256
  --max-position-embeddings: 256
  --attention-dropout: 0
  --hidden-dropout: 0.1
  --micro-batch-size: 1
  --global-batch-size: 8
  --train-iters: {STEPS}
  --lr: 1.0e-2
  --lr-decay-style: constant
  --mock-data: true
  --tokenizer-type: NullTokenizer
  --vocab-size: 63
  --eval-interval: 100
  --eval-iters: 0
  --log-interval: 1
  --num-workers: 1
  --memo-swap-ratio: 0.5
  --memo-resident-layers: 0
"""
PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--memo-plan", "auto")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def submit(cluster, tmp_path_factory):
    """`submit(script, name, *flags, options)`: number, log and folder of a job."""
    folder = tmp_path_factory.mktemp("jobs")
    config = folder / "tiny.yaml"
    config.write_text(CONFIG)

    def start(script, name, *flags, options=()):
        log, run = folder / f"{name}.log", folder / name
        job = cluster.submit(
            *("--gpus-per-node=0", f"--output={log}", *options),
            *(str(ROOT / "scripts/slurm" / script), str(config), *flags),
            cwd=ROOT,
            MEMO_PYTHON=sys.executable,
            PYTHONPATH=ROOT,
            MEMO_RUN=run,
        )
        return job, log, run

    return start


@pytest.fixture(scope="module")
def two_nodes(submit):
    """`two_nodes(name)`: the training job, a rank on each node."""
    options = ("--nodes=2", "--ntasks-per-node=1")
    return lambda name: submit("nodes.sbatch", name, *PARALLEL, options=options)


@pytest.fixture(scope="module")
def whole(cluster, two_nodes):
    job, log, run = two_nodes("whole")
    assert cluster.finish(job, SECONDS) == {"COMPLETED"}, log.read_text()[-3000:]
    return losses(run / "report-0.json")


def losses(report):
    rows = json.loads(report.read_text())["iterations"]
    return {row["iteration"]: row["lm_loss"] for row in rows}


def plans(run):
    found = sorted((run / "memo_plan").glob("*.plan.jsonl"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in found]


def warned(cluster, job):
    """As Slurm does it some minutes before the time limit (`--signal=B:USR1@...`)."""
    cluster.run("scancel", "--batch", "--signal=USR1", job)


def preempted(cluster, job):
    """By a job of a partition with priority, which needs a node for a second."""
    cluster.run("sbatch", "--partition=urgent", "--output=/dev/null", "--wrap=sleep 1")


@pytest.mark.parametrize("stop", [warned, preempted])
def test_a_job_stopped_in_the_middle_resumes_by_itself_and_repeats_the_numbers(
    cluster, two_nodes, whole, stop
):
    job, log, run = two_nodes(stop.__name__)
    cluster.wait_for(log, f"iteration        5/       {STEPS}", SECONDS)
    before = plans(run)
    stop(cluster, job)
    assert cluster.finish(job, SECONDS) == {"COMPLETED"}, log.read_text()[-3000:]
    first, second = losses(run / "report-0.json"), losses(run / "report-1.json")
    assert list(whole) == list(range(1, STEPS + 1))
    assert len(first) >= 5 and len(second) >= 1
    assert {**first, **second} == whole and not first.keys() & second.keys()
    assert plans(run) == before and len(before) == 2
    report = json.loads((run / "report-1.json").read_text())
    assert report["plan"]["replayed"]
    text = log.read_text()
    assert text.count("exiting program after receiving SIGTERM") == 1
    assert "memory plan is made anew" not in text


def test_a_job_that_fails_is_not_put_back(cluster, submit):
    options = ("--nodes=2", "--ntasks-per-node=1")
    job, log, _ = submit("nodes.sbatch", "failing", "--memo-swap-ratio", "7", options=options)
    assert cluster.finish(job, 120) == {"FAILED"}
    assert "--memo-swap-ratio 7.0: must be a number from 0" in log.read_text()


def test_a_sweep_measures_each_length_on_a_node_of_its_own(cluster, submit, monkeypatch):
    monkeypatch.setitem(cluster.env, "MEMO_LENGTHS", "256 512")
    options = ("--array=0-2",)
    job, log, run = submit("sweep.sbatch", "sweep", "--train-iters", "2", options=options)
    assert cluster.finish(job, SECONDS) == {"COMPLETED", "FAILED"}, log.read_text()[-3000:]
    assert "task 2 has no length: there are 2 (256 512)" in log.read_text()
    for length in (256, 512):
        assert list(losses(run / f"{length}.json")) == [1, 2]


def test_one_node_trains_with_torchrun_and_keeps_its_checkpoint(cluster, submit):
    job, log, run = submit("one_node.sbatch", "one", "--train-iters", "2")
    assert cluster.finish(job, SECONDS) == {"COMPLETED"}, log.read_text()[-3000:]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
