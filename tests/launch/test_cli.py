"""The console script."""

import re

import pytest

from megatron_memo import __version__, cli, environment


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"megatron-memo {__version__}"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_unknown_command_exits_with_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["nonsense"])
    assert end.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_profile_without_the_dashes_says_where_megatrons_flags_go(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["profile", "--num-layers", "4"])
    assert end.value.code == 2
    assert "--num-layers (the training run's flags go after --)" in capsys.readouterr().err


def test_mistake_of_a_command_is_a_sentence_and_status_2(monkeypatch, capsys):
    def mistaken(args):
        raise ValueError("--flag 1: must be 2. Give 2.")

    monkeypatch.setattr(environment, "run", mistaken)
    assert cli.main(["env"]) == 2
    assert capsys.readouterr().err == "megatron-memo: error: --flag 1: must be 2. Give 2.\n"


def test_env_ends_with_a_verdict(capsys):
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"torch +\d+\.\d+", next(line for line in lines if line.startswith("torch ")))
    assert any(line.startswith("transformer-engine") for line in lines)
    assert lines[-1].startswith("Ready to train on ")


def test_env_without_megatron_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(environment, "_location", lambda module: None)
    assert cli.main(["env"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Not ready: megatron.training missing."
    assert any("pip install 'megatron-core[training]'" in line for line in lines)
