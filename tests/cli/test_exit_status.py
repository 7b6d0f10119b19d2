"""Each command's exit statuses; those of `plan`, `solve` and `verify` as processes are in
tests/plan, those of `profile` in tests/profile."""

import os
import subprocess
import sys

import pytest

from megatron_memo import cli, environment
from megatron_memo.exit_status import Exit
from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.profile.trace import write_trace


@pytest.fixture
def traces(tmp_path):
    """Two different traces."""
    for name, layers in (("a", 3), ("b", 2)):
        write_trace(tmp_path / f"{name}.trace.jsonl", training(Shape(layers, 1)))
    return tmp_path / "a.trace.jsonl", tmp_path / "b.trace.jsonl"


def test_diff_of_equal_traces_is_0_and_of_different_ones_1(traces):
    one, other = map(str, traces)
    assert cli.main(["diff", one, one]) == Exit.DONE
    assert cli.main(["diff", one, other]) == Exit.NO


@pytest.mark.parametrize(
    "words",
    [
        ["diff", "{none}", "{none}"],
        ["plan", "{none}", "-o", "{folder}/plan.jsonl"],
        ["verify", "{none}"],
        ["solve", "{none}"],
        ["import-snapshot", "{none}", "-o", "{folder}/x.trace.jsonl"],
        ["export-snapshot", "{none}", "-o", "{folder}/x.pickle"],
        ["calibrate", "{none}", "--", "--num-layers", "1"],
        ["lr-scale", "--log", "{none}", "{none}", "--target-loss", "2", "--batch", "1M"],
        ["estimate"],
        ["profile"],
    ],
    ids=lambda words: words[0],
)
def test_a_file_that_is_not_there_or_flags_that_lack_are_2_and_one_line(words, tmp_path, capsys):
    none = str(tmp_path / "none")
    assert cli.main([word.format(none=none, folder=tmp_path) for word in words]) == Exit.MISTAKE
    said = capsys.readouterr().err.strip()
    assert said.startswith("megatron-memo") and "error: " in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "env"])
def test_an_unknown_flag_is_2_and_named(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--no-such-flag"])
    assert end.value.code == Exit.MISTAKE
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), Exit.INTERRUPTED, "megatron-memo: interrupted\n"),
        (
            PermissionError(13, "Permission denied", "/x/plan"),
            Exit.MISTAKE,
            "megatron-memo: error: /x/plan: Permission denied\n",
        ),
    ],
)
def test_an_end_from_outside_is_a_sentence_and_its_status(
    monkeypatch, capsys, raised, status, said
):
    def end(_args):
        raise raised

    monkeypatch.setattr(environment, "run", end)
    assert cli.main(["env"]) == status
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_ends_a_command_without_a_traceback():
    command = subprocess.Popen(
        [sys.executable, "-m", "megatron_memo.cli", "completion", "bash"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    command.stdout.close()
    said = command.stderr.read()
    assert command.wait() == Exit.PIPE_CLOSED
    assert said == b""
