"""Ranks forked from a warm process behave as those of torchrun do."""

import json
import os
import subprocess
import sys

import pytest

from megatron_memo.platform import is_active
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

SUM = """
import json, os, sys
import torch.distributed as dist, torch, megatron.core
import beside
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS", "GIVEN")
found = {name: os.environ[name] for name in names}
line = json.dumps([total.item(), sys.argv[1:], __name__, os.getcwd(), found]) + "\\n"
sys.stderr.write(line)  # at once: print() writes the line's end by itself, and ranks share the pipe
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "beside.py").write_text("")
        return tmp_path / "script.py"

    return write


def test_ranks_meet_and_have_what_torchrun_gives_them(script, monkeypatch):
    monkeypatch.setenv("GIVEN", "here")
    forked = run_ranks(2, script(SUM), ["--a", "b"], timeout=100)
    assert forked.returncode == 0, forked.stderr
    torchrun = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", script(SUM), "--a", "b"),
        ],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = [
        sorted(line for line in done.stderr.splitlines() if line.startswith("[3.0"))
        for done in (forked, torchrun)
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 2
    assert json.loads(said[0][0])[1:4] == [["--a", "b"], "__main__", "/"]


def test_a_rank_that_fails_ends_the_others_and_gives_its_status(script, tmp_path):
    text = (
        "import os, pathlib, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    assert run_ranks(2, script(text), [], timeout=100).returncode == 7
    if (tmp_path / "pid").exists():  # it got as far as that
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_traceback_is_on_stderr_and_a_signal_is_a_negative_status(script):
    failed = run_ranks(1, script("raise ArithmeticError('as meant')"), [], timeout=100)
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("ArithmeticError: as meant")
    killed = run_ranks(1, script("import os; os.kill(os.getpid(), 9)"), [], timeout=100)
    assert killed.returncode == -9


def test_ranks_that_do_not_end_are_ended(script):
    with pytest.raises(subprocess.TimeoutExpired):
        run_ranks(2, script("import time; time.sleep(600)"), [], timeout=1)
    assert run_ranks(1, script("pass"), [], timeout=100).returncode == 0


def test_one_run_leaves_nothing_to_the_next(script):
    run_ranks(1, script("import os, sys; os.environ['LEFT'] = '1'; sys.left = 1"), [], timeout=100)
    text = "import os, sys; assert 'LEFT' not in os.environ and not hasattr(sys, 'left')"
    assert run_ranks(1, script(text), [], timeout=100).returncode == 0
