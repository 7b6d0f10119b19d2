"""A scenario runs in processes of its own, one a rank; the tests judge its answers."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import run_ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """answers(scenario, ranks) -> what each rank's scenario returned.

    With `cp`, that many of the ranks share a sequence.
    """

    @cache
    def answer(scenario: str, ranks: int, cp: int = 1):
        out = tmp_path_factory.mktemp("answers") / "out.json"
        done = run_ranks(ranks, HERE / "worker.py", [out, cp, scenario], timeout=800)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(out.read_text())

    return answer
