"""Help fits a terminal, teaches by commands that work, and tells every exit status."""

import re
import shlex

import pytest

from megatron_memo import cli
from megatron_memo.cli_help import HelpFormatter
from megatron_memo.exit_status import MEANING, Exit

EVERY = pytest.mark.parametrize("command", [None, *cli.COMMANDS], ids=str)


@pytest.fixture
def help_of(capsys, monkeypatch):
    """``help_of(command)``: its --help in a terminal of 80 columns; of all commands for None."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(command):
        with pytest.raises(SystemExit) as end:
            cli.main(["--help"] if command is None else [command, "--help"])
        assert end.value.code == 0
        return capsys.readouterr().out

    return show


def examples(text):
    """Words of the commands that stand by themselves after "example"."""
    _, _, after = text.partition("\nexample")
    joined = after.replace("\\\n", " ")
    found = re.findall(r"^ +megatron-memo (.*)$", joined, re.MULTILINE)
    return [shlex.split(re.split(r" \|\| | > ", line)[0]) for line in found]


@EVERY
def test_help_shows_at_least_one_example_and_each_one_parses(help_of, command):
    found = examples(help_of(command))
    assert found
    for words in found:
        parsed = cli.parse(words)
        assert parsed.command in cli.COMMANDS
        assert callable(parsed.run)
    if command is not None:
        assert any(words[0] == command for words in found)


@EVERY
def test_help_has_no_line_over_100_columns_and_prose_none_over_80(help_of, command):
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 100
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if not any(line.startswith(" ") for line in lines):  # else a list, which stays as written
            assert all(len(line) <= 80 for line in lines)
    assert len(text.splitlines()) <= 90


@EVERY
def test_help_tells_exit_statuses_and_they_are_of_the_table(help_of, command):
    _, told = re.split(r"\n[Ee]xit status:", help_of(command))
    if command is None:
        assert all(re.search(rf"^ +{int(status)}  ", told, re.MULTILINE) for status in Exit)
    else:
        statuses = {int(number) for number in re.findall(r"\b\d+\b", told)}
        assert Exit.DONE in statuses
        assert statuses <= set(map(int, Exit))


def test_every_status_has_its_words():
    assert MEANING.keys() == set(Exit)


def test_paragraphs_are_filled_and_indented_ones_are_left_alone():
    given = "One sentence that\ngoes on.\n\nA list:\n  - first   item\n  - second\n\nThe end."
    made = HelpFormatter("x")._fill_text(given, 30, "")
    assert made == (
        "One sentence that goes on.\n\nA list:\n  - first   item\n  - second\n\nThe end."
    )


def test_a_value_that_looks_like_a_flag_is_judged_as_a_value(capsys):
    assert cli.main(["estimate", "--reserve", "-1GiB", "--", "--num-layers", "1"]) == 2
    error = capsys.readouterr().err
    assert "--reserve -1GiB: must be a size such as 80GiB" in error
    with pytest.raises(SystemExit):
        cli.main(["plan", "x.trace.jsonl", "-o", "y", "--workers", "-2"])
    assert "argument --workers: -2 is not at least 1" in capsys.readouterr().err
