"""What the pages quote is what the code says, and what commands printed."""

import argparse
import re

import pytest

import record
from megatron_memo import cli
from megatron_memo.config import MemoConfig
from megatron_memo.platform import is_active
from megatron_memo.refusals import check_supported
from tests.docs.commands import ROOT, blocks
from tests.docs.said import has_template, is_made_of

PREFIX = "megatron_memo: "
QUOTES = [
    (block.line, line)
    for block in blocks((ROOT / "docs" / "troubleshooting.md").read_text())
    if block.language == "text"
    for line in block.text.splitlines()
]
# Ends the part of a line that is the same on every machine.
ENDS = re.compile(r"[(;,]")
NUMBER = re.compile(r"\d[\d.]*(E[+-]\d+)?( ([KMGT]i)?B)?")


def recorded(name):
    """The lines of a recording, without the commands."""
    lines = (record.FOLDER / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("$ ")]


def shape(line):
    """A printed line without its numbers, as far as they do not decide what follows."""
    return ENDS.split(NUMBER.sub("#", line))[0].strip()


@pytest.mark.parametrize(("line", "quote"), QUOTES)
def test_a_quoted_message_is_in_the_code(line, quote):
    assert has_template(quote), f"docs/troubleshooting.md:{line}: {quote}"


def test_a_message_that_nobody_says_is_found():
    assert not has_template("memory plan: ... of ... requests were served at their leisure")


def test_there_is_a_recording_for_each_name_and_a_name_for_each_recording():
    there = {path.stem for path in record.FOLDER.glob("*.txt")}
    assert there == set(record.RECORDINGS)


@pytest.mark.parametrize("name", ["first_run", "resumed_run"])
def test_what_memo_says_in_a_recorded_log_is_in_the_code(name):
    said = [line for line in recorded(name) if line.startswith(PREFIX)]
    assert len(said) > 5
    for line in said:
        assert is_made_of(line) or is_made_of(line.removeprefix(PREFIX)), line


def test_the_recorded_refusal_is_the_one_of_today():
    flag = "--cpu-offloading-num-layers 1"
    args = argparse.Namespace(cpu_offloading_num_layers=1)
    with pytest.raises(ValueError) as refusal:
        check_supported(args, MemoConfig(swap_ratio=0.0))
    (line,) = recorded("refused")
    assert line == f"megatron-memo: error: {refusal.value}"
    assert flag in line


def test_the_recorded_learning_rate_is_the_one_of_today(capsys):
    command = (record.FOLDER / "lr_scale.txt").read_text().splitlines()[0]
    assert cli.main(command.removeprefix("$ megatron-memo ").split()) == 0
    assert capsys.readouterr().out.splitlines() == recorded("lr_scale")


def test_a_first_run_says_today_what_it_said_when_it_was_recorded(tmp_path):
    if not is_active():
        pytest.skip("runs on the CPU platform")
    today = {shape(line) for line in record.first_run(tmp_path).splitlines()}
    for line in recorded("first_run"):
        assert shape(line) in today, line
    written = {
        str(path.relative_to(tmp_path / "runs/first")) for path in tmp_path.rglob("memo_plan/*")
    }
    plan = {"ratio.json", "rank00000.plan.jsonl", "rank00000.trace.jsonl.gz", "report.html"}
    assert written == {f"memo_plan/{name}" for name in plan}
    for name in written:
        assert f"`{name}`" in (ROOT / "docs" / "files.md").read_text()
