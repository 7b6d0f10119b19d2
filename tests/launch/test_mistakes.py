"""A mistake ends in one paragraph from one rank and status 2; nothing is written."""

import sys
from pathlib import Path

import pytest

from megatron_memo.training.main import main

LAUNCHER = str(Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py")


@pytest.fixture(scope="module")
def refused(start, tiny, tmp_path_factory):
    """Two ranks with two refused flags, and folders that a started run would have written."""
    folder = tmp_path_factory.mktemp("refused")
    done = start(
        *(2, LAUNCHER, *tiny, "--train-iters", "2", "--memo-swap-ratio", "0.5"),
        *("--cpu-offloading-num-layers", "1", "--use-torch-fsdp2"),
        *("--save", str(folder / "save"), "--save-interval", "1"),
        *("--tensorboard-dir", str(folder / "board"), "--memo-report", str(folder / "r.json")),
    )
    return done, folder


@pytest.fixture
def alone(monkeypatch):
    """``alone(*words)``: the launcher in this process; gives its exit status."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", [LAUNCHER])
        with pytest.raises(SystemExit) as end:
            main(words)
        return end.value.code

    return run


def test_every_refused_flag_is_named_with_value_and_remedy_once(refused):
    done, _ = refused
    assert done.err.count("megatron-memo: error:") == 1
    assert done.err.count("--cpu-offloading-num-layers 1: the memo layer cannot") == 1
    assert done.err.count("--use-torch-fsdp2: the memo layer cannot") == 1
    assert "Use --use-distributed-optimizer instead." in done.err


def test_rank_ends_with_status_2_and_no_traceback(refused):
    done, _ = refused
    assert done.status != 0
    assert "exitcode  : 2" in done.err
    assert "megatron_memo/" not in done.err.replace(LAUNCHER, "")


def test_nothing_is_written(refused):
    assert list(refused[1].iterdir()) == []


def test_a_run_without_torchrun_exits_with_status_2_itself(alone, tiny, capsys):
    assert alone(*tiny, "--memo-swap-ratio", "1.5") == 2
    assert "--memo-swap-ratio 1.5: must be a number from 0" in capsys.readouterr().err


def test_help_shows_the_memo_group_in_sentences(alone, capsys):
    assert alone("--help") == 0
    out = capsys.readouterr().out
    group = out[out.index("\nmemo:\n") :]
    assert "One flag is enough: --memo-swap-ratio auto." in group
    assert "--memo-resident-layers N" in group
