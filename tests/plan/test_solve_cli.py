"""`megatron-memo solve` as a process: statuses, files, messages, Ctrl-C."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_memo.plan.instances import perfect
from megatron_memo.plan.verify import verify_layout

COMMAND = [sys.executable, "-m", "megatron_memo.plan.solve_cli"]


def write(path, triples):
    rows = "".join(f"{k},{a},{b},{size}\n" for k, (a, b, size) in enumerate(triples))
    path.write_text("id,lower,upper,size\n" + rows)
    return path


def run(*args):
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=250)


def wait_until_it_searches(process):
    """Until it has computed for four seconds, of which imports and the first layout take one: on a
    busy machine that is later."""
    ticks = 0
    while ticks < 4 * os.sysconf("SC_CLK_TCK") and process.poll() is None:
        time.sleep(0.02)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel


def verify_file(path, capacity=None):
    rows = list(csv.DictReader(path.open()))
    columns = [[int(row[c]) for row in rows] for c in ("lower", "upper", "size", "offset")]
    return verify_layout([row["id"] for row in rows], *columns, capacity=capacity)


@pytest.fixture
def easy(tmp_path):
    return write(tmp_path / "easy.csv", perfect(60, 40, 128, 4))


@pytest.fixture
def hard(tmp_path):
    return write(tmp_path / "hard.csv", perfect(300, 500, 10**6, 0))


def test_solved_is_0_and_the_output_verifies(easy, tmp_path):
    out = tmp_path / "out.csv"
    done = run(easy, "--capacity", 128, "-o", out)
    assert done.returncode == 0 and done.stderr == ""
    for text in ("solved: 60", "peak 128", "lower bound 128", "gap 0: optimal", "found by"):
        assert text in done.stdout
    assert verify_file(out, capacity=128).buffers == 60


def test_json_says_all_of_it(easy, tmp_path):
    out = tmp_path / "out.csv"
    done = run(easy, "--json", "-o", out, "--seed", 3, "--workers", 1)
    said = json.loads(done.stdout)
    assert said["status"] == "solved" and said["optimal"] and said["verified"]
    assert (said["peak"], said["lower_bound"], said["gap"]) == (128, 128, 0)
    assert said["output"] == str(out) and said["capacity"] is None
    assert said["found_by"] and said["lower_bound_by"] == "load"


@pytest.mark.parametrize("how", ["load", "search"])
def test_infeasible_is_3_and_writes_nothing(tmp_path, no_fit_at_load, how):
    triples = [(0, 2, 5), (1, 3, 5)] if how == "load" else no_fit_at_load
    path = write(tmp_path / "in.csv", triples)
    out = tmp_path / "out.csv"
    done = run(path, "--capacity", 9, "-o", out)
    assert done.returncode == 3 and "infeasible" in done.stdout
    assert ("by load" if how == "load" else "by canonical search") in done.stdout
    assert not out.exists()


def test_no_solution_in_time_is_4_and_writes_nothing(hard, tmp_path):
    out = tmp_path / "out.csv"
    done = run(hard, "--capacity", 10**6, "--time-limit", 1, "-o", out)
    assert done.returncode == 4
    assert "time limit" in done.stdout and "no solution in time" in done.stdout
    assert "best peak" in done.stdout and not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("capacity", [None, 10**6])
def test_ctrl_c_writes_the_best_verified_layout_and_says_so(hard, tmp_path, number, capacity):
    out = tmp_path / "out.csv"
    more = ["--capacity", str(capacity)] if capacity else []
    process = subprocess.Popen(
        [*COMMAND, str(hard), "-o", str(out), "--time-limit", "200", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_it_searches(process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == (4 if capacity else 0), stderr
    assert "interrupted: this is the best layout so far" in stdout
    assert f"written to {out}" in stdout and stderr == ""
    assert ("needs more than the capacity" in stdout) == bool(capacity)
    assert f"peak {verify_file(out).peak}" in stdout


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("", [], "is empty"),
        ("id,lower,upper\n", [], "no column size"),
        ("id,lower,upper,size\n", [], "no buffers"),
        ("id,lower,upper,size\na,0,1,0\n", [], "size is 0"),
        ("id,lower,upper,size\na,0,1,99999999999999999\n", [], "2^53"),
        ("id,lower,upper,size\na,0,1,1.5\n", [], "integer"),
        ("id,lower,upper,size\na,0,1,5\n", ["--capacity", "4"], "can't hold buffer 'a'"),
        ("id,lower,upper,size\na,0,1,5\n", ["--capacity", "-4"], "at least 1"),
        ("id,lower,upper,size\na,0,1,5\n", ["--capacity", "many"], "not an integer"),
        ("id,lower,upper,size\na,0,1,5\n", ["--time-limit", "0"], "not above 0"),
        ("id,lower,upper,size\na,0,1,5\n", ["--time-limit", "nan"], "not above 0"),
        ("id,lower,upper,size\na,0,1,5\n", ["--workers", "0"], "at least 1"),
        ("id,lower,upper,size\na,0,1,5\n", ["-o", "no/such/folder/x.csv"], "does not exist"),
        ("id,lower,upper,size\na,0,1,5\n", ["-o", "."], "is a folder"),
    ],
)
def test_broken_input_is_2_with_one_line_and_no_traceback(tmp_path, text, more, says):
    path = tmp_path / "in.csv"
    path.write_text(text)
    done = run(path, *more)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].count("error:") == 1
    assert done.stdout == ""


def test_the_output_may_not_be_the_input(easy):
    before = easy.read_text()
    done = run(easy, "-o", easy)
    assert done.returncode == 2 and "names the input itself" in done.stderr
    assert easy.read_text() == before


def test_a_deterministic_run_writes_the_same_file_twice(easy, tmp_path):
    outs = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for out in outs:
        assert run(easy, "--deterministic", "-o", out).returncode == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_help_explains_the_exit_status():
    done = run("--help")
    assert done.returncode == 0 and "3 proven" in done.stdout
