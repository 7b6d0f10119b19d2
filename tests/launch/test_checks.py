"""Mistakes that are found before anything starts."""

import argparse
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

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
    """Three documents of 5, 0 and 7 tokens, written by upstream."""
    prefix = str(tmp_path / "text")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for tokens in (5, 0, 7):
        builder.add_document(np.ones(tokens, dtype=np.uint16), [tokens])
    builder.finalize(prefix + ".idx")
    return prefix


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


CONTEXT = dict(
    context_parallel_size=2,
    cp_comm_type=["a2a"],
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
)


def test_context_parallelism_that_all_can_share_passes():
    check_flags(args(**CONTEXT), MEMO, own_modules=True)


def test_sequence_that_context_parallel_ranks_cannot_share_names_the_next_one_that_they_can():
    text = message(check_flags, args(**CONTEXT | {"seq_length": 66}), None, False)
    assert text.startswith("--seq-length 66: does not divide by 4: --context-parallel-size 2")
    assert text.endswith("such as 68.")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"context_parallel_size": 4}, "--num-query-groups 4 over --tensor-model-parallel-size 2"),
        (
            {"context_parallel_size": 8, "group_query_attention": False},
            "--num-attention-heads 8 over --tensor-model-parallel-size 2 are 4 a rank",
        ),
    ],
)
def test_heads_that_context_parallel_ranks_cannot_share_are_refused_with_what_they_can(
    changes, part
):
    text = message(check_flags, args(**CONTEXT | {"seq_length": 512} | changes), None, True)
    assert text.startswith(f"--context-parallel-size {changes['context_parallel_size']}: ")
    assert part in text
    assert "Give one of 1, 2" in text
    engine = args(
        **CONTEXT | changes | {"seq_length": 512, "transformer_impl": "transformer_engine"}
    )
    check_flags(engine, MEMO, own_modules=True)  # whose attention has limits of its own


def test_chunks_are_counted_in_a_context_parallel_ranks_tokens():
    memo = MemoConfig(swap_ratio=0.5, resident_layers=0, chunks=17)
    assert "more than the 16 tokens" in message(check_flags, args(**CONTEXT), memo, True)


PACKED = dict(dataloader_inter_document_masking=True, micro_batch_size=2)


def test_packed_samples_share_a_row_of_tokens():
    check_flags(args(**PACKED), MEMO, own_modules=True)
    memo = MemoConfig(swap_ratio=0.5, resident_layers=0, chunks=64)
    check_flags(args(**PACKED), memo, own_modules=True)  # 64 of 2 x 64 / 2 tokens


def test_a_row_of_several_packed_samples_is_refused_over_pipeline_stages():
    text = message(check_flags, args(**PACKED, pipeline_model_parallel_size=2), MEMO, True)
    assert text.startswith("--micro-batch-size 2: --dataloader-inter-document-masking joins")
    check_flags(
        args(**PACKED | {"micro_batch_size": 1}, pipeline_model_parallel_size=2), MEMO, True
    )


def test_groups_that_would_differ_in_size_name_the_nearest_that_would_not():
    heads = dict(num_attention_heads=8, group_query_attention=True)
    text = message(check_flags, args(num_query_groups=3, **heads), None, False)
    assert text.startswith("--num-query-groups 3: does not divide --num-attention-heads 8")
    assert text.endswith("such as 2.")
    check_flags(args(num_query_groups=4, **heads), None, False)
    check_flags(args(num_query_groups=3, num_attention_heads=8), None, False)  # not turned on


def test_layers_of_further_tokens_count_as_layers():
    everything = MemoConfig(swap_ratio=0.5, resident_layers=5)
    check_flags(args(mtp_num_layers=2), everything, own_modules=True)
    text = message(check_flags, args(mtp_num_layers=1), everything, True)
    assert "all 5 layers" in text and "Give at most 4" in text


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


@pytest.mark.parametrize("flag", ["report", "trace"])
def test_report_in_a_folder_that_is_not_there_is_refused(flag, tmp_path):
    path = str(tmp_path / "missing" / "report.json")
    text = message(check_flags, args(**{f"memo_{flag}": path}), None, False)
    assert text.startswith(f"--memo-{flag} {path}: is not a file that can be written")


def test_measuring_after_the_end_is_refused(tmp_path):
    flags = args(memo_report=str(tmp_path / "r"), memo_measure_memory="11")
    assert "training ends after --train-iters 10" in message(check_flags, flags, None, False)


@pytest.mark.parametrize(("interval", "given"), [(None, ": not given"), (0, " 0: has no length")])
@pytest.mark.parametrize("iterations", [0, 100])
def test_evaluation_without_an_interval_is_refused(interval, given, iterations):
    flags = args(eval_interval=interval, eval_iters=iterations)
    text = message(check_flags, flags, None, False)
    assert text.startswith(f"--eval-interval{given}")
    assert "--eval-interval N" in text and "--eval-iters 0" in text


def test_saving_without_an_interval_is_refused():
    said = message(check_flags, args(save="runs/7b", save_interval=None), None, False)
    assert said.startswith("--save runs/7b: ") and "--save-interval 100" in said
    check_flags(args(save="runs/7b", save_interval=100), None, own_modules=False)
    check_flags(args(save=None, save_interval=None), None, own_modules=False)


@pytest.mark.parametrize("elsewhere", ["full_validation", "skip_train"])
def test_interval_that_megatron_does_not_need_may_be_left_out(elsewhere):
    check_flags(args(eval_interval=None, eval_iters=100, **{elsewhere: True}), None, False)
    check_flags(args(eval_interval=5, eval_iters=100), None, False)


@pytest.mark.parametrize("elsewhere", [None, "full_validation", "skip_train"])
def test_interval_is_refused_exactly_where_megatron_would_crash(monkeypatch, elsewhere):
    from megatron.training import training

    flags = args(
        **dict(eval_interval=None, eval_iters=0, full_validation=False, skip_train=False),
        **dict(train_samples=None, global_batch_size=4, phase_transition_iterations=None),
        start_eval_at_iter=None,
    )
    if elsewhere:
        setattr(flags, elsewhere, True)
    monkeypatch.setattr(training, "get_args", lambda: flags)
    if elsewhere:
        check_flags(flags, None, False)
        training.get_train_valid_test_num_samples()
    else:
        assert "--eval-interval" in message(check_flags, flags, None, False)
        with pytest.raises(TypeError):
            training.get_train_valid_test_num_samples()


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


def test_dataset_that_was_cut_short_is_refused_with_its_sizes(dataset):
    tokens = Path(dataset + ".bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    text = message(check_files, args(data_path=["0.3", dataset]))
    assert text.startswith(f"--data-path {dataset}: {dataset}.bin has 23 bytes where {dataset}.idx")
    assert "needs 24" in text and "prepare_data.py" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: b"", "is not a Megatron index file"),
        (lambda data: b"garbage" * 20, "is not a Megatron index file"),
        (lambda data: data[:20], "ends after 20 bytes, inside its header"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "has version 2 and id type 8"),
        (lambda data: data[:17] + b"\x09" + data[18:], "has version 1 and id type 9"),
        (lambda data: data[:-4], "has 98 bytes where its header needs 102"),
        (lambda data: data[:18] + bytes(16), "says that the dataset is empty"),
    ],
)
def test_damaged_index_is_refused(dataset, change, expected):
    index = Path(dataset + ".idx")
    index.write_bytes(change(index.read_bytes()))
    text = message(check_files, args(train_data_path=[dataset]))
    assert text.startswith(f"--train-data-path {dataset}: {dataset}.idx {expected}")


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
