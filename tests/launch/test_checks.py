"""Mistakes that are found before anything starts."""

import argparse
import json

import pytest
import torch

from megatron_memo.config import MemoConfig
from megatron_memo.training.checks import check_files, check_flags

MEMO = MemoConfig(swap_ratio=0.5, resident_layers=0)


def args(**changes):
    plain = dict(
        seq_length=64,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        num_layers=4,
        transformer_impl="local",
        mock_data=False,
        train_iters=10,
    )
    return argparse.Namespace(**plain | changes)


@pytest.fixture
def dataset(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_bytes(b"")
    return str(tmp_path / "text")


def message(call, *arguments):
    with pytest.raises(ValueError) as error:
        call(*arguments)
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- flags


def test_plain_flags_pass():
    check_flags(args(), MEMO, own_modules=True)
    check_flags(args(), None, own_modules=False)


def test_sequence_that_ranks_cannot_share_names_the_next_one_that_they_can():
    text = message(check_flags, args(seq_length=65), None, False)
    assert text.startswith("--seq-length 65: does not divide by --tensor-model-parallel-size 2")
    assert "such as 66" in text


def test_more_chunks_than_tokens_of_a_rank_are_refused():
    memo = MemoConfig(swap_ratio=0.5, chunks=33, resident_layers=0)
    assert message(check_flags, args(), memo, True).startswith("--memo-chunks 33: more than the 32")


def test_ratio_without_effect_is_refused():
    memo = MemoConfig(swap_ratio=1.0, resident_layers=4)
    text = message(check_flags, args(), memo, True)
    assert text.startswith("--memo-resident-layers 4: keeps the activations of all 4 layers")
    assert "at most 3" in text


def test_spec_and_ratio_cannot_both_choose_layers():
    text = message(check_flags, args(spec=["a.module", "a_spec"]), MEMO, True)
    assert text.startswith(
        "--spec a.module a_spec: chooses the layers, and so does --memo-swap-ratio"
    )


def test_report_in_a_folder_that_is_not_there_is_refused(tmp_path):
    path = str(tmp_path / "missing" / "report.json")
    text = message(check_flags, args(memo_report=path), None, False)
    assert text.startswith(f"--memo-report {path}: is not a file that can be written")


def test_measuring_after_the_end_is_refused(tmp_path):
    flags = args(memo_report=str(tmp_path / "r"), memo_measure_memory="11")
    assert "training ends after --train-iters 10" in message(check_flags, flags, None, False)


# ---- data


def test_dataset_that_is_there_passes(dataset):
    check_files(args(data_path=[dataset]))
    check_files(args(data_path=["0.3", dataset, "0.7", dataset]))
    check_files(args(mock_data=True))


@pytest.mark.parametrize("words", [["{}"], ["0.5", "{}"], ["{}", "{}"]])
def test_missing_dataset_is_named_with_its_files(tmp_path, words):
    prefix = str(tmp_path / "none")
    text = message(check_files, args(data_path=[word.format(prefix) for word in words]))
    assert text.startswith(f"--data-path {prefix}: {prefix}.idx and {prefix}.bin not found")
    assert "scripts/prepare_data.py" in text


def test_half_a_dataset_is_named(dataset, tmp_path):
    (tmp_path / "text.idx").unlink()
    assert f"{dataset}.idx not found" in message(check_files, args(data_path=[dataset]))


def test_no_data_at_all_is_refused():
    assert "--mock-data" in message(check_files, args())


def test_missing_dataset_in_a_file_of_paths_is_named(tmp_path):
    (tmp_path / "paths").write_text("0.5 /none/a 0.5 /none/b")
    text = message(check_files, args(data_args_path=str(tmp_path / "paths")))
    assert "--data-args-path" in text and "/none/a.idx" in text


def test_missing_dataset_of_one_split_is_named(tmp_path, dataset):
    splits = {"train": [dataset], "valid": "/none/v", "test": None}
    (tmp_path / "splits").write_text(json.dumps(splits))
    text = message(check_files, args(per_split_data_args_path=str(tmp_path / "splits")))
    assert "/none/v.idx" in text


def test_file_of_paths_that_is_not_there_is_named():
    text = message(check_files, args(data_args_path="/none/paths"))
    assert text.startswith("--data-args-path /none/paths: cannot be read")


def test_remote_datasets_are_left_to_megatron():
    check_files(args(data_path=["s3://bucket/text"]))


# ---- checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    saved = argparse.Namespace(
        num_layers=4, hidden_size=64, num_attention_heads=4, padded_vocab_size=128
    )
    folder = tmp_path / "checkpoint"
    (folder / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    file = folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"args": saved, "model": {"w": torch.zeros(3)}}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return str(folder)


def shape(**changes):
    return args(**{"mock_data": True, "num_attention_heads": 4, "hidden_size": 64, **changes})


def test_checkpoint_of_the_same_shape_passes(checkpoint):
    check_files(shape(load=checkpoint))
    check_files(shape(load=checkpoint, padded_vocab_size=128))


def test_checkpoint_of_another_shape_names_every_value_that_differs(checkpoint):
    text = message(check_files, shape(load=checkpoint, hidden_size=32, padded_vocab_size=256))
    assert text.startswith(f"--load {checkpoint}: the checkpoint holds a model of another shape")
    assert "--hidden-size is 32 here and 64 in the checkpoint" in text
    assert "--vocab-size (padded) is 256 here and 128 in the checkpoint" in text
    assert "--num-layers" not in text


def test_shape_taken_from_the_checkpoint_is_not_compared(checkpoint):
    check_files(shape(load=checkpoint, hidden_size=32, use_checkpoint_args=True))


def test_folder_without_a_checkpoint_is_a_fresh_start(tmp_path):
    check_files(shape(load=str(tmp_path)))


def test_checkpoint_that_its_tracker_names_but_is_gone_is_refused(checkpoint):
    text = message(check_files, shape(load=checkpoint, ckpt_step=9))
    assert "iter_0000009, which is not there" in text
