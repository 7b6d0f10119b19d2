"""What is done with the command line before Megatron's ``pretrain``: flags, checks, settings.

Shared by the launcher and by a profile, so that both take and refuse the same.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from megatron_memo import compat, compat_versions
from megatron_memo.arguments import (
    add_memo_arguments,
    memo_config_from_args,
    plan_settings_from_args,
)
from megatron_memo.config import MemoConfig
from megatron_memo.training.modules import ModuleChoice, choose, layer_spec

_said: list[str] = []

# As in upstream's launch script.
ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    from megatron_memo.training import modelopt

    parser = modelopt.add_arguments(add_memo_arguments(parser))
    compat.repair_help(parser)
    return parser


def check_before_start(args: Namespace) -> None:
    """Check the command line while nothing has been set up yet.

    Raises:
        ValueError: see ``training.checks``.
    """
    from megatron_memo.training.checks import check_files, check_flags
    from megatron_memo.training.older_checks import check_older

    check_older(args)
    if args.yaml_cfg is not None:
        _refuse_memo_flags_with_yaml(args)
        return
    memo = memo_config_from_args(args)
    plan_settings_from_args(args)
    modules = choose(args, memo)
    if modules.replace:
        _share_contexts_our_way(args)
    check_flags(args, memo, modules.replace)
    check_files(args)
    if modules.replace and args.create_attention_mask_in_dataloader:
        # It would be s^2 booleans a sample, 16 GiB at 128K tokens.
        imply(
            ["--no-create-attention-mask-in-dataloader"],
            "the attention kernel is causal by itself and reads no s x s mask",
        )


def _share_contexts_our_way(args: Namespace) -> None:
    """Megatron's default for context parallelism is none of memo's own attention's ways.

    One that was asked for stays, and is refused with the other flags.
    """
    ours = args.transformer_impl != "transformer_engine" and args.context_parallel_size > 1
    given = any(word.partition("=")[0] == "--cp-comm-type" for word in sys.argv)
    if ours and not given:
        args.cp_comm_type = ["a2a"]
        imply(
            ["--cp-comm-type a2a"],
            "memo's own attention trades heads for tokens between context-parallel ranks",
        )


def _refuse_memo_flags_with_yaml(args: Namespace) -> None:
    memo_flags = [word for word in sys.argv if word.startswith("--memo-")]
    if memo_flags:
        raise ValueError(
            f"--yaml-cfg {args.yaml_cfg}: Megatron then reads nothing else from the command line, "
            f"so {memo_flags[0]} would have no effect. Give the settings as flags instead."
        )


def imply(flags: list[str], why: str) -> None:
    """Append flags to the command line, which Megatron parses again; one line says so."""
    for flag in flags:
        sys.argv += flag.split()
    if flags:
        log(f"{why}: added {' '.join(flags)}")


def check_validated(args: Namespace) -> tuple[MemoConfig | None, ModuleChoice, str | None]:
    """Check again what ``--use-checkpoint-args`` or the tokenizer have decided meanwhile.

    Returns:
        The settings, whose norm and attention, and what the host has for moved activations.

    Raises:
        ValueError: see ``training.checks``.
    """
    from megatron_memo.training.checks import check_checkpoint, check_flags
    from megatron_memo.training.host_memory import with_host_memory
    from megatron_memo.training.loss_head import device_memory, head_of
    from megatron_memo.training.older_checks import check_older

    memo = memo_config_from_args(args)
    if args.yaml_cfg is not None:
        return None, ModuleChoice(False), None
    modules = choose(args, memo)
    check_flags(args, memo, modules.replace)
    check_older(args)
    check_checkpoint(args)
    head_of(args, device_memory(args))
    memo, room = with_host_memory(args, memo)
    return memo, modules, room


def model_config(args: Namespace, memo: MemoConfig | None, modules: ModuleChoice) -> Any:
    """Upstream's description of the model, with memo's layers where they are wanted.

    Args:
        args: validated.
        memo: None without a swap ratio.
        modules: whose norm and attention.

    Returns:
        A GPTModelConfig, or before 0.19 a function that builds a model chunk.
    """
    if not compat_versions.describes_models():
        from megatron_memo.training.older_model import model_provider

        return model_provider(args, layer_spec(memo) if modules.replace else None)
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_memo.training import modelopt

    config_class = modelopt.config_class(args)
    found: Any = (
        gpt_config_from_args(args)
        if config_class is None
        else gpt_config_from_args(args, model_config_cls=config_class)
    )
    if modules.replace:
        found.transformer_layer_spec = layer_spec(memo)
    return found


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def log(text: str) -> None:
    _said.append(text)
    if rank() == 0:
        print(f"megatron_memo: {text}", flush=True)


def said() -> Sequence[str]:
    """What was logged so far, on any rank: for the page that a run leaves."""
    return _said
