"""Everything that decides what a rank asks of memory, as plain values that can be compared.

A profile and a training run compute it alike from Megatron's validated arguments, so that a plan
made from the one is used in the other only where it fits.
"""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_memo import __version__, compat_versions, platform
from megatron_memo.config import MemoConfig

Fingerprint = dict[str, Any]

# Arguments beside those that upstream's config classes name.
_ARGUMENTS = (
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "padded_vocab_size",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_percent",
    "group_query_attention",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_loss_and_grad",
    "check_for_spiky_loss",
    "create_attention_mask_in_dataloader",
    "use_distributed_optimizer",
    "no_persist_layer_norm",
    "use_tp_pp_dp_mapping",
    "align_grad_reduce",
    "ddp_num_buckets",
    "ddp_bucket_size",
    "memo_modules",
)
# Fields of those classes that change numbers, names or the order of work on the host, not memory.
_NO_MATTER = re.compile(
    r"^(lr|min_lr|decoupled_.*lr|weight_decay|.*loss_scale|loss_scale_window|hysteresis|adam_.*|"
    r"sgd_.*|muon_.*|lion_.*|soap_.*|adaptive_muon_.*|grad_norm_skip_threshold|timers|config_logger_dir|"
    r".*init_method.*|.*_func|layernorm_epsilon|test_mode|inference_.*|pin_cpu_.*|softmax_scale|.*_comm_backend|.*_bootstrap_backend|"
    r"use_cpu_initialization|init_model_with_meta_device|perform_initialization|barrier_.*)$"
)


def fingerprint(args: Any, memo: MemoConfig | None, rank: dict[str, Any]) -> Fingerprint:
    """What decides the requests of one rank.

    Args:
        args: Megatron's, validated.
        memo: None where memo is off.
        rank: of the rank itself: stage, share of the optimizer; see `compat.rank_kind`.

    Returns:
        Plain values (numbers, text, flags, lists of them) by name. What is off, or as upstream's
        configs have it by themselves, is left out: their version is in it.
    """
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.training import get_megatron_optimizer_config

    from megatron_memo.training.loss_head import device_memory, head_of

    found: Fingerprint = {
        "torch": version("torch").partition("+")[0],
        "megatron-core": _version_of("megatron-core"),
        "megatron-memo": __version__,
        "attention kernel": _attention_kernel(),
        "world size": args.world_size,
    }
    for name in _ARGUMENTS:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            found[name] = _plain(value)
    for config in (
        core_transformer_config_from_args(args),
        compat_versions.ddp_config(args),
        get_megatron_optimizer_config(args)[0],
    ):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if not _NO_MATTER.match(field.name) and value != _default(field):
                found[field.name] = _plain(value)
    if memo is not None:
        for name, value in dataclasses.asdict(memo).items():
            if name not in ("sync", "host", "link_bandwidth"):
                found[f"memo {name}"] = value
    head = head_of(args, device_memory(args))
    if head is not None:
        found["loss chunks"] = head.chunks
    found.update(rank)
    return found


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """What differs, in plain words, one line each; empty if nothing does.

    Args:
        theirs: of the trace or plan.
        ours: of this run.
    """
    lines = []
    for name in dict.fromkeys((*theirs, *ours)):
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            lines.append(f"{name.replace('_', ' ')} is {_said(there)} there and {_said(here)} here")
    return lines


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _said(value: Any) -> str:
    return "off" if value is None else "on" if value is True else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _version_of(package: str) -> str:
    """Of a package; a checkout on PYTHONPATH has none that can be asked for."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "checkout"


def _attention_kernel() -> str:
    """flash-attn's runs on CUDA only: a profile shows torch's in any case."""
    from megatron_memo.ops.flash_attention import HAVE_FLASH_ATTN

    return "flash-attn" if HAVE_FLASH_ATTN and not platform.is_active() else "torch"
