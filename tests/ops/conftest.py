"""What the tests over ranks share: one run of a worker answers all of a file's questions."""

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory):
    """`answers_of(worker, ranks)`: what each rank of tests/ops/{worker}.py answered."""

    def run(worker, ranks):
        out = tmp_path_factory.mktemp(worker) / "out.json"
        done = run_ranks(ranks, HERE / f"{worker}.py", [str(out)], timeout=800)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return {"ranks": ranks, **json.loads(out.read_text())}

    return run
