"""Starting a run, showing it, and reading its report: with stand-ins for the training script."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import compare
import quickstart
from lib import launch as launching
from lib.launch import LaunchError, Machine, launch, progress_line, tail

ONE = Machine(ranks=1, flags=("--from-machine",), environment=(("FROM_MACHINE", "yes"),))
LINE = (
    " [2026-11-30 14:57:16.280780] iteration        3/      20 | consumed samples:            3 | "
    "elapsed time per iteration (ms): 10693.2 | learning rate: 4.0E-03 | global batch size:     1 "
    "| lm loss: 5.738873E+00 | loss scale: 1.0 | grad norm: 6.718 |"
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that makes a stand-in for the training script, started without torchrun."""
    monkeypatch.setattr(
        launching,
        "command",
        lambda machine, flags, path: [sys.executable, str(path), *flags],
    )

    def make(body):
        path = tmp_path / "stand_in.py"
        path.write_text(f"import json, os, sys, time\nreport = sys.argv[-1]\n{body}\n")
        return path

    return make


def _launch(tmp_path, path, flags=("--a", "b")):
    log, report = tmp_path / "logs" / "run.log", tmp_path / "report.json"
    return launch(ONE, flags, log=log, report=report, script=path), log.read_text()


def test_a_run_gives_its_report_and_shows_its_iterations(tmp_path, script, capsys):
    path = script(
        f"print({LINE!r}); print('noise'); "
        "json.dump([sys.argv[1:], os.environ['FROM_MACHINE'], os.environ['OMP_NUM_THREADS']], "
        "open(report, 'w'))"
    )
    (words, variable, threads), log = _launch(tmp_path, path)
    assert words[:3] == ["--a", "b", "--from-machine"]
    assert words[3] == "--memo-report"
    assert (variable, threads) == ("yes", "1")
    assert capsys.readouterr().out == "    iteration   3/20   loss 5.7389   10.69 s\n"
    assert "noise" in log
    assert log.startswith(shlex.quote(sys.executable))


def test_the_first_iteration_is_told_once_and_the_wait_for_it_has_its_parts(tmp_path, script):
    told = []
    path = script(f"print({LINE!r}); print({LINE!r}); json.dump([], open(report, 'w'))")
    log, report = tmp_path / "logs" / "run.log", tmp_path / "report.json"
    launch(ONE, [], log=log, report=report, script=path, begun=lambda: told.append(1))
    assert told == [1]
    said = quickstart.first_iteration(200.4, 3, 20)
    assert said.startswith("First memo iteration after 223 s: environment 200, data 3, start")


def test_a_failed_run_shows_what_it_said(tmp_path, script):
    path = script("print('before'); print('megatron-memo: error: bad ratio'); sys.exit(2)")
    with pytest.raises(LaunchError, match=r"status 2 after") as error:
        _launch(tmp_path, path)
    assert "  | megatron-memo: error: bad ratio" in str(error.value)
    assert str(tmp_path / "logs" / "run.log") in str(error.value)


def test_a_run_without_a_report_is_a_failure_even_if_an_old_report_lies_there(tmp_path, script):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(LaunchError, match="left no report"):
        _launch(tmp_path, script("pass"))


def test_torchruns_summary_does_not_push_the_cause_out_of_view(tmp_path):
    log = tmp_path / "log"
    summary = [
        "W1130 14:00:00 1 torch/distributed/elastic/x.py:1028] Sending process 7 closing signal",
        "E1130 14:00:00 1 torch/distributed/elastic/multiprocessing/api.py:988] failed (code 2)",
        *["line of torchrun's traceback"] * 40,
    ]
    log.write_text("\n".join(["command", "the cause", *summary]))
    assert tail(log) == "  | the cause"


def test_lines_of_other_ranks_do_not_hide_an_iteration():
    assert progress_line("Number of parameters: 0.0[Rank 1] memory" + LINE) is not None
    assert progress_line("[Rank 1] (after 1 iterations) memory (MB)") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_whole_run(tmp_path, number):
    pid_file = tmp_path / "pid"
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    starter = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path\n"
        "from lib import launch\n"
        "launch.stop_on_sigterm()\n"
        "launch.command = lambda machine, flags, path: [sys.executable, str(path), *flags]\n"
        "launch.launch(launch.Machine(1, ()), [], log=Path('log'), report=Path('report'), "
        f"script=Path({str(stand_in)!r}))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", starter], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(number)
    run.wait(timeout=30)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 30
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(child)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def _report(seconds, losses, peak, host=None):
    last = len(losses)
    return {
        "iterations": [
            {"iteration": n, "seconds": s, "lm_loss": loss, "metered": n == last}
            for n, (s, loss) in enumerate(zip(seconds, losses, strict=True), start=1)
        ],
        "peak_activation_bytes": peak,
        "swap": None if host is None else {"host_bytes": host},
        "versions": {"torch": "2.x"},
    }


def test_first_and_metered_iterations_are_not_timed():
    result = compare.Result.from_report("x", _report([1, 5, 4, 2], [3.0, 2.0, 1.0, 0.5], 100))
    assert (result.seconds, result.peak_bytes, result.host_bytes) == (4, 100, 0)


def test_a_run_too_short_to_measure_is_refused():
    with pytest.raises(ValueError, match="too short"):
        compare.Result.from_report("x", _report([1, 2], [1.0, 1.0], 100))


def test_the_table_gives_ratios_to_stock_and_the_largest_loss_difference():
    stock = compare.Result("stock", 2.0, 1_000_000, 0, (3.0, 2.0))
    memo = compare.Result("memo", 3.0, 250_000, 500_000, (3.0, 2.5))
    lines = compare.table([stock, memo, compare.Result("same", 2.0, 1, 0, (3.0, 2.0))]).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")][:2] == [
        "stock",
        "1.00x (2.00 s)",
    ]
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "memo",
        "1.50x (3.00 s)",
        "0.2 MB (0.25x)",
        "0.5 MB",
        "5.0e-01",
    ]
    assert lines[4].rstrip("| ").endswith("none")
    assert len({len(line) for line in lines}) == 1


def test_the_comparison_runs_every_way_and_leaves_numbers(tmp_path, monkeypatch, capsys):
    calls = []

    def fake_launch(machine, flags, *, log, report):
        calls.append((flags, log.name))
        host = 10 if "--memo-swap-ratio" in flags else None
        return _report([9, 2, 3], [3.0, 2.0, 1.0], 1000 + len(calls), host)

    monkeypatch.setattr(compare, "launch", fake_launch)
    compare.run(ONE, ["--model"], iterations=3, folder=tmp_path)
    assert len(calls) == len(compare.VARIANTS) == len({log for _, log in calls}) == 5
    for flags, _ in calls:
        assert flags[0] == "--model"
        assert flags[flags.index("--memo-measure-memory") + 1] == "3"
        assert flags[flags.index("--train-iters") + 1] == "3"
    out = capsys.readouterr().out
    assert "memo, ratio 0.5" in out
    assert "--memo-resident-layers 0" in out
    comment, header, *rows = (tmp_path / "compare.csv").read_text().splitlines()
    assert comment.startswith("# ")
    assert header.split(",")[:4] == ["variant", "seconds", "time_ratio", "peak_bytes"]
    assert len(rows) == 5


@pytest.mark.parametrize("tool", ["compare.py", "quickstart.py"])
def test_help_says_what_it_is_for(tool):
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / tool), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0
    assert "Megatron" in run.stdout


def test_the_report_is_json_that_compare_can_read(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(_report([1, 2, 3], [1.0, 2.0, 3.0], 5, 6)))
    assert compare.Result.from_report("x", json.loads(path.read_text())).host_bytes == 6
