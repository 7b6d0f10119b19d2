"""The launcher: Megatron's own ``pretrain`` with memo's flags.

Order matters: the CPU platform before any import of Megatron; the checks before anything is
written or allocated; training after that. Modules that import Megatron are imported late for it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

_PROGRAM_START = time.time()

import torch  # noqa: E402  (its import is part of the start-up time that Megatron reports)

from megatron_memo import compat, platform  # noqa: E402
from megatron_memo.arguments import (  # noqa: E402
    add_memo_arguments,
    check_memo_words,
    measured_iteration,
    memo_config_from_args,
)
from megatron_memo.config import MemoConfig  # noqa: E402
from megatron_memo.training.cpu_defaults import follow_cpu  # noqa: E402
from megatron_memo.training.modules import ModuleChoice, choose, layer_spec  # noqa: E402
from megatron_memo.training.user_error import exit_with  # noqa: E402

# As in upstream's launch script.
ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says.

    Args:
        argv: arguments without the program's name; None takes the process's own. Megatron reads
            ``sys.argv`` again by itself, so a given list replaces it.

    Raises:
        SystemExit: status 2 after a mistake of the user's, which one rank explains; otherwise
            as Megatron ends.
    """
    entered = time.time()
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    if _rank() != 0:
        # Every rank would give the same warnings.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        check_memo_words(sys.argv[1:])
    except ValueError as mistake:
        exit_with(str(mistake))
    if not torch.cuda.is_available():
        platform.activate()
    compat.install_import_hooks()

    from megatron.training import set_startup_timestamps
    from megatron.training.arguments import parse_and_validate_args, parse_args

    raw = parse_args(extra_args_provider=_add_arguments)
    if platform.is_active():
        _imply(follow_cpu(raw), "no CUDA here")
    try:
        _check_before_start(raw)
    except ValueError as mistake:
        exit_with(str(mistake))

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=entered)
    args = parse_and_validate_args(
        extra_args_provider=_add_arguments, args_defaults=dict(ARGS_DEFAULTS)
    )
    try:
        memo, modules = _check_validated(args)
    except ValueError as mistake:
        exit_with(str(mistake))
    _pretrain(args, memo, modules)


def _add_arguments(parser: ArgumentParser) -> ArgumentParser:
    from megatron_memo.training import modelopt

    parser = modelopt.add_arguments(add_memo_arguments(parser))
    compat.repair_help(parser)
    return parser


def _check_before_start(args: Namespace) -> None:
    """Check the command line while nothing has been set up yet.

    Raises:
        ValueError: see ``training.checks``.
    """
    from megatron_memo.training.checks import check_files, check_flags

    if args.yaml_cfg is not None:
        _refuse_memo_flags_with_yaml(args)
        return
    memo = memo_config_from_args(args)
    modules = choose(args, memo)
    check_flags(args, memo, modules.replace)
    check_files(args)
    if modules.replace and args.create_attention_mask_in_dataloader:
        # It would be s^2 booleans a sample, 16 GiB at 128K tokens.
        _imply(
            ["--no-create-attention-mask-in-dataloader"],
            "the attention kernel is causal by itself and reads no s x s mask",
        )


def _refuse_memo_flags_with_yaml(args: Namespace) -> None:
    memo_flags = [word for word in sys.argv if word.startswith("--memo-")]
    if memo_flags:
        raise ValueError(
            f"--yaml-cfg {args.yaml_cfg}: Megatron then reads nothing else from the command line, "
            f"so {memo_flags[0]} would have no effect. Give the settings as flags instead."
        )


def _imply(flags: list[str], why: str) -> None:
    """Append flags to the command line, which Megatron parses again; one line says so."""
    for flag in flags:
        sys.argv += flag.split()
    if flags:
        _log(f"{why}: added {' '.join(flags)}")


def _check_validated(args: Namespace) -> tuple[MemoConfig | None, ModuleChoice]:
    """Check again what ``--use-checkpoint-args`` or the tokenizer have decided meanwhile.

    Raises:
        ValueError: see ``training.checks``.
    """
    from megatron_memo.training.checks import check_checkpoint, check_flags

    memo = memo_config_from_args(args)
    if args.yaml_cfg is not None:
        return None, ModuleChoice(False)
    modules = choose(args, memo)
    check_flags(args, memo, modules.replace)
    check_checkpoint(args)
    return memo, modules


def _pretrain(args: Namespace, memo: MemoConfig | None, modules: ModuleChoice) -> None:
    """Hand over to upstream's ``pretrain``; ``args`` are validated and set globally."""
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_memo.layer.chunks import describe
    from megatron_memo.training import modelopt
    from megatron_memo.training.datasets import train_valid_test_datasets_provider
    from megatron_memo.training.gpt import embedding_ranks, forward_step
    from megatron_memo.training.report import Recorder

    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    modelopt.enable(args)
    config_class = modelopt.config_class(args)
    model_config: Any = (
        gpt_config_from_args(args)
        if config_class is None
        else gpt_config_from_args(args, model_config_cls=config_class)
    )
    if modules.replace:
        model_config.transformer_layer_spec = layer_spec(memo)
    if modules.why:
        _log(f"norm and core attention of the layers are memo's ({modules.why})")
    if memo is not None:
        ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
        _log(describe(memo, args.seq_length, ranks, args.num_layers))

    recorder = None
    if getattr(args, "memo_report", None) is not None:
        recorder = Recorder(args.memo_report, memo, measured_iteration(args))
        compat.wrap_train_step(recorder.step, recorder.forward_backward)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            train_valid_test_datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=embedding_ranks,
        )
    except SystemExit as end:
        # How Megatron ends early when asked to (--exit-interval, a signal): as good an end.
        if recorder is not None and not end.code:
            recorder.write()
        raise
    if recorder is not None:
        recorder.write()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _log(text: str) -> None:
    if _rank() == 0:
        print(f"megatron_memo: {text}", flush=True)
