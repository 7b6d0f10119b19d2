"""Mistakes found before Megatron starts: nothing has been written and no memory taken yet."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from megatron_memo import compat
from megatron_memo.arguments import flag_of, measured_iteration
from megatron_memo.config import MemoConfig
from megatron_memo.refusals import check_supported
from megatron_memo.training.dataset_files import damage
from megatron_memo.training.sequence_checks import check_sequences

# Fields of the command line that shape a checkpoint's tensors, and the flag of each.
_SHAPE = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels",
    "group_query_attention": "--group-query-attention",
    "num_query_groups": "--num-query-groups",
    "swiglu": "--swiglu",
    "normalization": "--normalization",
    "add_bias_linear": "--disable-bias-linear",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "padded_vocab_size": "--vocab-size (padded)",
}
_REMOTE = ("s3://", "msc://")


def check_flags(args: argparse.Namespace, memo: MemoConfig | None, own_modules: bool) -> None:
    """Everything the flags alone tell.

    Args:
        args: parsed arguments, validated by Megatron or not yet.
        memo: None without a swap ratio.
        own_modules: memo's norm and attention are used.

    Raises:
        ValueError: flag, value, limit and remedy of the first mistake (refusals: of all).
    """
    if memo is not None or own_modules:
        check_supported(args, memo)
    _check_spec(args, memo, own_modules)
    check_sequences(args, memo, own_modules)
    _check_heads(args)
    _check_residency(args, memo)
    _check_evaluation(args)
    _check_saving(args)
    _check_report(args)


def check_files(args: argparse.Namespace) -> None:
    """The files that the run will read exist and fit.

    Raises:
        ValueError: a dataset's file is missing or damaged, no data at all, or a checkpoint of
            another shape.
    """
    _check_data(args)
    check_checkpoint(args)


def check_checkpoint(args: argparse.Namespace) -> None:
    """The checkpoint that ``--load`` names has the model's shape; values not known yet are skipped.

    Raises:
        ValueError: the values that differ.
    """
    if getattr(args, "use_checkpoint_args", False):
        return  # the checkpoint's own shape will be used
    saved = compat.checkpoint_args(args)
    if saved is None:
        return
    differing = []
    for name, flag in _SHAPE.items():
        theirs, ours = getattr(saved, name, None), getattr(args, name, None)
        if name == "num_query_groups" and not getattr(args, "group_query_attention", False):
            continue
        if theirs is not None and ours is not None and theirs != ours:
            differing.append(f"{flag} is {ours} here and {theirs} in the checkpoint")
    if differing:
        raise ValueError(
            f"--load {args.load}: the checkpoint holds a model of another shape: "
            f"{'; '.join(differing)}. Give the checkpoint's values (--use-checkpoint-args takes "
            "them for you), or load another checkpoint."
        )


def _check_spec(args: argparse.Namespace, memo: MemoConfig | None, own_modules: bool) -> None:
    spec = getattr(args, "spec", None)
    if spec and (memo is not None or own_modules):
        flag = "--memo-swap-ratio" if memo is not None else "--memo-modules memo"
        raise ValueError(
            f"--spec {' '.join(spec)}: chooses the layers, and so does {flag}. Drop one of the "
            "two. (The memo layer is reachable as --spec megatron_memo.layer.spec "
            "memo_layer_spec, with its settings in MEMO_* variables.)"
        )


def _check_heads(args: argparse.Namespace) -> None:
    """Megatron finds this out while it builds the model, by a traceback."""
    heads, groups = getattr(args, "num_attention_heads", None), None
    if getattr(args, "group_query_attention", False):
        groups = getattr(args, "num_query_groups", None)
    if heads and groups and heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - groups))
        raise ValueError(
            f"--num-query-groups {groups}: does not divide --num-attention-heads {heads}, so that "
            f"groups would differ in size. Use a divisor, such as {nearest}."
        )


def _check_residency(args: argparse.Namespace, memo: MemoConfig | None) -> None:
    layers = getattr(args, "num_layers", None)
    if layers is not None:
        layers += getattr(args, "mtp_num_layers", None) or 0
    if memo is not None and layers is not None and memo.resident_layers >= layers:
        raise ValueError(
            f"--memo-resident-layers {memo.resident_layers}: keeps the activations of all "
            f"{layers} layers on the device, so --memo-swap-ratio {memo.swap_ratio:g} would have "
            f"no effect. Give at most {layers - 1}; 0 saves the most memory."
        )


def _check_evaluation(args: argparse.Namespace) -> None:
    """Megatron divides by the interval when it counts samples, before it asks whether to evaluate.

    Source: ``get_train_valid_test_num_samples`` of megatron/training/training.py, which does so
    unless one of ``elsewhere`` is given.
    """
    elsewhere = ("full_validation", "skip_train", "perform_rl_step")
    if not hasattr(args, "eval_interval") or any(getattr(args, name, False) for name in elsewhere):
        return
    interval = args.eval_interval
    if not interval:
        given = (
            "--eval-interval: not given" if interval is None else "--eval-interval 0: has no length"
        )
        raise ValueError(
            f"{given}, and Megatron divides by it to count the samples to read, even where "
            "--eval-iters 0 turns evaluation off. Give --eval-interval N to evaluate every N "
            "iterations, such as --eval-interval 1000, and --eval-iters 0 with it if there is "
            "nothing to evaluate on."
        )


def _check_saving(args: argparse.Namespace) -> None:
    """Megatron's ``validate_args`` says this by an assertion without a word."""
    if getattr(args, "save", None) and getattr(args, "save_interval", 0) is None:
        raise ValueError(
            f"--save {args.save}: Megatron wants to be told how often. Give --save-interval N to "
            "save every N iterations, such as --save-interval 100; it saves at the end as well."
        )


def _check_report(args: argparse.Namespace) -> None:
    measured = measured_iteration(args)
    last = getattr(args, "train_iters", None)
    if measured is not None and last is not None and measured > last:
        raise ValueError(
            f"--memo-measure-memory {measured}: training ends after --train-iters {last}. Give at "
            f"most {last}."
        )
    for flag in ("memo_report", "memo_trace"):
        _check_writable(flag_of(flag), getattr(args, flag, None))


def _check_writable(flag: str, path: str | None) -> None:
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(
            f"{flag} {path}: is not a file that can be written; {folder} must be an "
            "existing folder with write permission. Make the folder, or name another file."
        )


def _check_data(args: argparse.Namespace) -> None:
    if getattr(args, "mock_data", False) or getattr(args, "perform_rl_step", False):
        return
    some = False
    for flag, prefix in _data_prefixes(args):
        some = True
        if prefix.startswith(_REMOTE):
            continue
        missing = [
            prefix + suffix for suffix in (".idx", ".bin") if not os.path.isfile(prefix + suffix)
        ]
        if missing and not (getattr(args, "sft", False) and os.path.exists(prefix)):
            raise ValueError(
                f"{flag} {prefix}: {' and '.join(missing)} not found. Give the dataset's path "
                "without .bin or .idx; scripts/prepare_data.py makes a dataset from text files."
            )
        if not missing:
            _check_whole(flag, prefix)
    if not some and getattr(args, "sft_mock_dataset_config_json", None) is None:
        raise ValueError(
            "--data-path: not given, and nothing else names data to train on. Give --data-path "
            "PREFIX for a dataset made by scripts/prepare_data.py, or --mock-data for made-up "
            "tokens."
        )


def _check_whole(flag: str, prefix: str) -> None:
    try:
        fault = damage(prefix)
    except OSError as error:
        raise ValueError(
            f"{flag} {prefix}: {error.filename} cannot be read ({error.strerror}). Give files with "
            "read permission."
        ) from None
    if fault is not None:
        raise ValueError(
            f"{flag} {prefix}: {fault}. The dataset is damaged or was copied in part: copy both "
            "files again, or make the dataset again with scripts/prepare_data.py --overwrite."
        )


def _data_prefixes(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flag and path prefix of every dataset on the command line or in the files it names."""
    for flag, words in _data_words(args):
        # Megatron takes prefixes, or pairs of weight and prefix.
        weights = words[0::2]
        paired = len(words) % 2 == 0 and all(_is_number(word) for word in weights)
        for prefix in words[1::2] if paired else words:
            yield flag, prefix.strip()


def _data_words(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(args, name, None)
        if words:
            yield "--" + name.replace("_", "-"), list(words)
    if path := getattr(args, "data_args_path", None):
        yield f"--data-args-path {path}, entry", _read(path, "--data-args-path").split()
    if path := getattr(args, "per_split_data_args_path", None):
        try:
            splits = json.loads(_read(path, "--per-split-data-args-path"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--per-split-data-args-path {path}: is not JSON ({error}). Give a file with one "
                "list of paths for each of train, valid and test."
            ) from None
        for split in splits.values():
            words = split.split() if isinstance(split, str) else list(split or ())
            yield f"--per-split-data-args-path {path}, entry", words


def _read(path: str, flag: str) -> str:
    if path.startswith(_REMOTE):
        return ""
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: cannot be read ({error.strerror}). Give an existing file."
        ) from None


def _is_number(word: Any) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
