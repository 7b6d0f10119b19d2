"""The memo flags: what they give, and the sentence a wrong one gets."""

import argparse
import sys

import pytest

from megatron_memo.arguments import (
    add_memo_arguments,
    check_memo_words,
    measured_iteration,
    memo_config_from_args,
)
from megatron_memo.config import Experts, MemoConfig


def parse(*words):
    return add_memo_arguments(argparse.ArgumentParser()).parse_args(words)


def test_without_flags_memo_is_off():
    assert memo_config_from_args(parse()) is None
    assert memo_config_from_args(argparse.Namespace()) is None
    assert measured_iteration(parse()) is None


def test_one_flag_is_enough():
    assert memo_config_from_args(parse("--memo-swap-ratio", "0.5")) == MemoConfig(swap_ratio=0.5)


@pytest.mark.parametrize("policy", list(Experts))
def test_what_experts_do_reaches_the_config(policy):
    args = parse("--memo-swap-ratio", "0", "--memo-moe-experts", policy.value)
    args.num_experts = 4
    assert memo_config_from_args(args) == MemoConfig(swap_ratio=0.0, moe_experts=policy)


def test_a_policy_for_experts_of_a_dense_model_is_refused():
    with pytest.raises(ValueError, match=r"--memo-moe-experts keep: has no effect without --num-"):
        memo_config_from_args(parse("--memo-swap-ratio", "0", "--memo-moe-experts", "keep"))


def test_every_flag_reaches_the_config():
    args = parse(
        *("--memo-swap-ratio", "1", "--memo-chunks", "3", "--memo-resident-layers", "0"),
        *("--memo-sync", "--memo-poison", "--memo-prefetch-depth", "4"),
    )
    assert memo_config_from_args(args) == MemoConfig(
        swap_ratio=1.0, chunks=3, resident_layers=0, sync=True, poison=True, prefetch_depth=4
    )


@pytest.mark.parametrize("word", ["auto", "layers"])
def test_a_prefetch_depth_may_be_a_word(word):
    config = memo_config_from_args(parse("--memo-swap-ratio", "1", "--memo-prefetch-depth", word))
    assert config == MemoConfig(swap_ratio=1.0, prefetch_depth=word)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memo-swap-ratio", "half"], "--memo-swap-ratio half: must be auto, or a number from 0"),
        (["--memo-swap-ratio", "1.5"], "--memo-swap-ratio 1.5: must be a number from 0"),
        (["--memo-swap-ratio", "nan"], "--memo-swap-ratio nan: must be a number from 0"),
        (["--memo-swap-ratio", "0.5", "--memo-chunks", "0"], "--memo-chunks 0: must be at least 1"),
        (
            ["--memo-swap-ratio", "0.5", "--memo-chunks", "2.5"],
            "--memo-chunks 2.5: must be",
        ),
        (
            ["--memo-swap-ratio", "0.5", "--memo-resident-layers", "-1"],
            "--memo-resident-layers -1: must be 0 or more",
        ),
        (
            ["--memo-swap-ratio", "0.5", "--memo-prefetch-depth", "0"],
            "--memo-prefetch-depth 0: must be a whole number from 1, auto or layers",
        ),
        (
            ["--memo-swap-ratio", "0.5", "--memo-prefetch-depth", "all"],
            "--memo-prefetch-depth all: must be",
        ),
        (["--memo-prefetch-depth", "layers"], "--memo-prefetch-depth layers: has no effect"),
        (["--memo-chunks", "4"], "--memo-chunks 4: has no effect without --memo-swap-ratio"),
        (
            ["--memo-moe-experts", "keep"],
            "--memo-moe-experts keep: has no effect without --memo-swap-ratio",
        ),
        (["--memo-poison"], "--memo-poison: has no effect without --memo-swap-ratio"),
        (["--memo-resident-layers", "2"], "--memo-resident-layers 2: has no effect without"),
    ],
)
def test_wrong_value_gets_one_paragraph(words, sentence):
    with pytest.raises(ValueError) as error:
        memo_config_from_args(parse(*words))
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memo-measure-memory", "3"], "--memo-measure-memory 3: the result goes into the file"),
        (
            ["--memo-measure-memory", "0", "--memo-report", "r"],
            "--memo-measure-memory 0: it",
        ),
        (["--memo-measure-memory", "x", "--memo-report", "r"], "--memo-measure-memory x: must be"),
    ],
)
def test_wrong_measurement_gets_one_paragraph(words, sentence):
    with pytest.raises(ValueError) as error:
        measured_iteration(parse(*words))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memo-swap-ration", "0.5"], "--memo-swap-ration: there is no such flag. Did you mean"),
        (["--memo-chunk=4"], "--memo-chunk: there is no such flag. Did you mean --memo-chunks?"),
        (["--memo_sync"], "--memo_sync: there is no such flag. Did you mean --memo-sync?"),
        (["--memo-zzzzzzzzzzzzz"], "--memo-zzzzzzzzzzzzz: there is no such flag. There are --memo"),
        (["--memo-modules", "mine"], "--memo-modules: invalid choice"),
        (["--memo-host-budget", "-1GiB"], "--memo-host-budget -1GiB: must not be below 0."),
        (["--memo-report", "--lr", "1"], "--memo-report: expected one argument"),
    ],
)
def test_mistyped_flag_gets_one_paragraph_instead_of_the_usage(words, sentence, capsys):
    with pytest.raises(ValueError) as error:
        check_memo_words(["--num-layers", "2", *words])
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_right_flags_and_those_of_megatron_pass():
    check_memo_words(["--lr", "1", "--memo-swap-ratio=1", "--memo-poison", "--load", "memo-x"])
    check_memo_words(["--help"])
    check_memo_words([])


def test_launcher_answers_a_mistyped_flag_with_status_2(monkeypatch, capsys):
    from megatron_memo.training.main import main

    monkeypatch.setattr(sys, "argv", ["pretrain"])
    with pytest.raises(SystemExit) as end:
        main(["--memo-swap-ration", "0.5"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "--memo-swap-ration: there is no such flag. Did you mean --memo-swap-ratio?" in error
    assert len(error.strip().splitlines()) == 1


def test_every_flag_explains_itself_in_sentences():
    parser = add_memo_arguments(argparse.ArgumentParser())
    ours = [action for action in parser._actions if action.dest.startswith("memo_")]
    assert len(ours) == 19
    for action in ours:
        assert action.help.endswith("."), action.dest
        assert len(action.help.split()) > 12, action.dest
