"""What the tests over ranks share: one torchrun of a worker answers all of a file's questions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory):
    """`answers_of(worker, ranks)`: what each rank of tests/ops/{worker}.py answered."""

    def run(worker, ranks):
        out = tmp_path_factory.mktemp(worker) / "out.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
            "--standalone", str(HERE / f"{worker}.py"), str(out),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return {"ranks": ranks, **json.loads(out.read_text())}

    return run
