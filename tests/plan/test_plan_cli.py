"""`megatron-memo plan` and `verify` as processes: statuses, files, messages, Ctrl-C."""

import gzip
import json
import signal
import subprocess
import sys

import pytest

from megatron_memo.phases import START
from megatron_memo.plan.instances import perfect
from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.plan_file import load_plan
from megatron_memo.profile.trace import Free, Header, Malloc, Trace, write_trace

COMMAND = [sys.executable, "-m", "megatron_memo.cli"]
HEADER = (
    '{"format": "megatron-memo trace", "version": 1, "source": "profile"}\n'
    '["p","other","",null,null,null,null]\n'
)


def run(*args):
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces")
    write_trace(path / "rank0.trace.jsonl", training(Shape(3, 2)))
    write_trace(path / "rank1.trace.jsonl.gz", training(Shape(2, 1)))
    return path


@pytest.fixture
def hard(tmp_path):
    """A trace whose bound no search meets soon."""
    triples = perfect(300, 500, 10**6, 0)
    steps = sorted(
        [(lower, 1, Malloc(k, size, 0, "")) for k, (lower, _, size) in enumerate(triples)]
        + [(upper, 0, Free(k)) for k, (_, upper, _) in enumerate(triples)]
    )
    header = Header("profile", rounding=1)
    events = tuple(event for *_, event in steps)
    write_trace(tmp_path / "hard.trace.jsonl", Trace(header, (START,), events))
    return tmp_path / "hard.trace.jsonl"


def test_a_plan_is_written_verified_and_told(folder, tmp_path):
    out = tmp_path / "it.plan.jsonl"
    trace = folder / "rank0.trace.jsonl"
    done = run("plan", trace, "-o", out)
    assert done.returncode == 0, done.stderr
    for text in ("gap 0: optimal", "verified", "lower bound", "native allocator", "expandable"):
        assert text in done.stdout
    assert f"written to {out}" in done.stdout
    plan = load_plan(out)
    assert plan.gap == 0 and plan.windows[0].source == trace.name
    seen = run("verify", out, trace)
    assert seen.returncode == 0 and seen.stderr == ""
    for text in ("overlap", "alignment", "coverage", "fingerprint and every request"):
        assert text in seen.stdout


def test_json_says_all_of_it(folder, tmp_path):
    out = tmp_path / "it.plan.jsonl"
    traces = sorted(folder.iterdir())
    done = run("plan", *traces, "-o", out, "--json", "--seed", 3, "--workers", 1)
    said = json.loads(done.stdout)
    assert said["arena"] == said["lower_bound"] == load_plan(out).arena and said["optimal"]
    assert [w["source"] for w in said["windows"]] == [t.name for t in traces]
    assert said["caching_allocator"]["native"] >= said["caching_allocator"]["expandable_segments"]
    assert run("verify", out, *traces).returncode == 0


def test_a_folder_gives_one_plan_for_each_trace(folder, tmp_path):
    out = tmp_path / "plans"
    done = run("plan", folder, "-o", out)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["rank0.plan.jsonl", "rank1.plan.jsonl"]
    assert run("verify", out / "rank1.plan.jsonl", folder / "rank1.trace.jsonl.gz").returncode == 0


def test_requests_below_the_filter_are_left_to_the_native_allocator(folder, tmp_path):
    out = tmp_path / "it.plan.jsonl"
    run("plan", folder / "rank0.trace.jsonl", "-o", out, "--smallest", 1 << 28)
    plan = load_plan(out)
    assert plan.smallest == 1 << 28
    assert all(e.offset is None or e.size >= 1 << 28 for e in plan.windows[0].entries)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_best_verified_plan_and_says_so(hard, tmp_path, number):
    out = tmp_path / "it.plan.jsonl"
    process = subprocess.Popen(
        [*COMMAND, "plan", str(hard), "-o", str(out), "--time-limit", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The first line of progress: the search is under way and has a layout.
    first = process.stderr.readline()
    assert "above the bound" in first, first
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 4, stderr
    assert "interrupted: this is the best plan so far" in stdout and "Traceback" not in stderr
    plan = load_plan(out)
    assert f"arena {plan.arena} bytes" in stdout and plan.gap > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no trace"),
        (HEADER + '["end",0]\n', "empty"),
        (HEADER + '["m",1,0,0,"x"]\n["end",1]\n', "0 bytes"),
        (HEADER + '["m",1,9007199254740993,0,"x"]\n["f",1]\n["end",2]\n', "2^53"),
        (HEADER + '["m",1,1.5,0,"x"]\n["end",1]\n', "no line of a trace"),
        (HEADER + '["f",1]\n["end",1]\n', "before its malloc"),
        (HEADER + '["m",1,5,0,"x"]\n["f",1]\n["f",1]\n["end",3]\n', "given back twice"),
        (HEADER + '["m",1,5,0,"x"]\n["end",1]\n', "no request can be planned"),
        (HEADER + '["m",1,5,0,"x"]\n["f",1]\n', "cut off"),
        (HEADER + '["m",1,9007199254740992,0,"x"]\n["f",1]\n["end",2]\n', None),
    ],
)
def test_broken_traces_are_2_with_one_line_and_no_traceback(tmp_path, text, says):
    path, out = tmp_path / "in.trace.jsonl", tmp_path / "out.plan.jsonl"
    path.write_text(text)
    done = run("plan", path, "-o", out)
    if says is None:  # the largest size that there is
        assert done.returncode == 0 and load_plan(out).arena == 2**53
        return
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["none.trace.jsonl", "-o", "x"], "No such file"),
        (["rank0.trace.jsonl", "-o", "no/such/folder/x"], "does not exist"),
        (["rank0.trace.jsonl", "-o", "."], "is a folder"),
        (["rank0.trace.jsonl", "-o", "rank0.trace.jsonl"], "names the input itself"),
        ([".", "rank0.trace.jsonl", "-o", "x"], "one folder alone"),
        (["rank0.trace.jsonl", "-o", "x", "--smallest", "0"], "not at least 1"),
        (["rank0.trace.jsonl", "-o", "x", "--time-limit", "nan"], "not above 0"),
        (["rank0.trace.jsonl"], "-o"),
        ([], "TRACE"),
    ],
)
def test_wrong_command_lines_are_2_and_say_why(folder, monkeypatch, args, says):
    monkeypatch.chdir(folder)
    before = sorted(p.name for p in folder.iterdir())
    done = run("plan", *args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == before


def test_a_folder_without_traces_and_one_with_doubles_are_refused(tmp_path):
    done = run("plan", tmp_path, "-o", tmp_path / "plans")
    assert done.returncode == 2 and "no trace in this folder" in done.stderr
    trace = training(Shape(1))
    write_trace(tmp_path / "a.trace.jsonl", trace)
    write_trace(tmp_path / "a.trace.jsonl.gz", trace)
    done = run("plan", tmp_path, "-o", tmp_path / "plans")
    assert done.returncode == 2 and "twice" in done.stderr


def test_verify_tells_broken_files_2_from_wrong_plans_5(folder, tmp_path):
    trace, other = folder / "rank0.trace.jsonl", folder / "rank1.trace.jsonl.gz"
    out = tmp_path / "it.plan.jsonl"
    assert run("plan", trace, "-o", out).returncode == 0
    done = run("verify", out, other)
    assert done.returncode == 5 and "made for something else: made up was" in done.stderr
    (tmp_path / "bad.trace.jsonl.gz").write_bytes(gzip.compress(b"[]\n"))
    assert run("verify", out, tmp_path / "bad.trace.jsonl.gz").returncode == 2
    text = out.read_text()
    out.write_text(text.replace('"arena":', '"arena":1', 1))
    done = run("verify", out)
    assert done.returncode == 2 and "damaged or edited" in done.stderr
    out.write_text(text[:-100])
    done = run("verify", out)
    assert done.returncode == 2 and "cut off" in done.stderr
    assert run("verify", tmp_path / "none").returncode == 2


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_help_explains_the_exit_status(command):
    done = run(command, "--help")
    assert done.returncode == 0 and "Exit status: 0" in " ".join(done.stdout.split())


def test_planning_and_verifying_do_not_import_torch():
    code = (
        "import sys, megatron_memo.plan.plan_cli, megatron_memo.plan.verify_cli;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
