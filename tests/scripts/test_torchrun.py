"""torchrun.sh: one node, two nodes that meet, and the pods that start it."""

import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
import yaml

from megatron_memo.platform import is_active
from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from lib.config import read_config

SCRIPT = str(ROOT / "scripts/torchrun.sh")
# As the quickstart's, but for a shorter context and data that need no preparation.
SHORT = """
    --seq-length 256 --max-position-embeddings 256 --mock-data --train-iters 2 --eval-iters 0
    --lr-warmup-iters 0 --memo-swap-ratio 0.5 --memo-resident-layers 0
"""


def environment(folder):
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "NCCL_DEBUG")}
    settings = {"MEMO_PYTHON": sys.executable, "MEMO_RUN": str(folder / "run")}
    return {**kept, **settings, "PYTHONPATH": str(ROOT)}


def shown(folder, *words):
    """The command that it would run, from another folder."""
    run = subprocess.run(
        [SCRIPT, *words, "--dry-run"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(run.stdout)


def after(words, flag):
    return words[words.index(flag) + 1]


def test_one_node_keeps_its_checkpoints_in_its_folder(tmp_path):
    words = shown(tmp_path, str(ROOT / "configs/gpt-7b-1m.yaml"), "--data-path", "data/mine")
    assert "--standalone" in words and after(words, "--nproc-per-node") == "8"
    run = str(tmp_path / "run")
    assert (after(words, "--save"), after(words, "--load")) == (run, run)
    assert after(words, "--data-path") == "data/mine"


def test_the_pods_are_the_nodes_of_their_config_and_meet_in_the_first(tmp_path):
    service, job = yaml.safe_load_all((ROOT / "scripts/kubernetes/job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    script, config, *words = [*container["command"], *container["args"]]
    assert (ROOT / script).samefile(SCRIPT)
    nodes = read_config(ROOT / config).nodes
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == nodes
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == read_config(ROOT / config).ranks_per_node
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]

    command = shown(tmp_path, str(ROOT / config), *words)
    assert after(command, "--nnodes") == str(nodes)
    assert after(command, "--rdzv-backend") == "c10d"
    assert after(command, "--rdzv-endpoint") == f"{name}-0.{pod['subdomain']}:29500"


@pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")
def test_two_nodes_meet_over_tcp_and_train(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report = tmp_path / "report.json"
    words = ["--nodes", "2", "--ranks-per-node", "1", "--rdzv", f"127.0.0.1:{port}"]
    words += [*SHORT.split(), "--memo-report", str(report)]
    nodes = [
        subprocess.Popen(
            [SCRIPT, str(ROOT / "configs/quickstart.yaml"), *words],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(out[-3000:] for out in said)
    assert [row["iteration"] for row in json.loads(report.read_text())["iterations"]] == [1, 2]
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "2"
    # Each of the two is a rank of one tensor-parallel group.
    assert sum("iteration        2/       2" in out for out in said) == 1


def test_a_python_that_is_not_there_is_named(tmp_path):
    env = {**environment(tmp_path), "MEMO_PYTHON": "/no/python"}
    run = subprocess.run(
        [SCRIPT, str(ROOT / "configs/gpt-7b-1m.yaml")], env=env, capture_output=True, text=True
    )
    assert run.returncode == 1 and run.stderr.startswith("/no/python: no such Python. Make")
