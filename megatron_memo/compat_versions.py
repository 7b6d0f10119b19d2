"""Which Megatron this is, and its way of doing what 0.16 to 0.19 do differently.

Part of ``compat``: one function a difference, the same for its callers whatever is installed. What
0.19 does is here, what older versions do in ``compat_older``. Features are detected by attribute or
signature.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import os
import runpy
from collections.abc import Callable
from typing import Any

import torch

from megatron_memo import compat_older

# Oldest (major, minor) of megatron-core that the tests run against; see patches/README.md.
OLDEST = (0, 16)


@functools.cache
def _package_info() -> dict[str, Any] | None:
    """What ``package_info.py`` of ``megatron.core`` says, or None where there is no such package.

    The file is run by itself: what is too old may not even import with this torch.
    """
    core = _folder("megatron.core")
    return None if core is None else runpy.run_path(os.path.join(core, "package_info.py"))


def _folder(package: str) -> str | None:
    """Where ``megatron.core`` or ``megatron.training`` would be imported from; it is not."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return spec.submodule_search_locations[0]


def version() -> str:
    """The version of megatron-core that is imported here.

    Its own ``__version__`` names a commit as well, of whatever repository it happens to lie in.
    """
    info = _package_info()
    return "none" if info is None else ".".join(map(str, info["VERSION"][:3]))


def check_version(*, training: bool) -> None:
    """Refuse a Megatron that memo cannot work with. Call it when the platform is on.

    Touches ``MAJOR`` and ``MINOR`` of ``megatron.core.package_info`` (all versions): of what is
    older than ``OLDEST`` nothing is known that could be asked for.

    Args:
        training: ``megatron.training`` is needed too, which no wheel before 0.17 holds.

    Raises:
        ValueError: none, an older one, or one without ``megatron.training``.
    """
    remedy = "Install megatron-core 0.19 (pip install -r requirements.txt)"
    info = _package_info()
    if info is None:
        raise ValueError(
            f"megatron.core: not found by this Python. {remedy}, or put a Megatron-LM checkout on "
            "PYTHONPATH."
        )
    if (info["MAJOR"], info["MINOR"]) < OLDEST:
        raise ValueError(
            f"megatron-core {version()}: memo works with {OLDEST[0]}.{OLDEST[1]} and newer. "
            f"{remedy}, or take branch core_r0.19.0 of Megatron-LM."
        )
    if training and _folder("megatron.training") is None:
        raise ValueError(
            f"megatron-core {version()}: comes without megatron.training, which memo runs. "
            f"{remedy}, or put the Megatron-LM checkout of this version on PYTHONPATH."
        )


@functools.cache
def describes_models() -> bool:
    """Whether upstream builds a GPT from one description, which may hold a function for its layers.

    Looks for ``megatron.training.models.gpt`` (since 0.19; before, the launch script gives a
    function that builds the model), without an import: one that fails for want of some other
    package would look like an older version. Goes with ``compat_older``.
    """
    training = _folder("megatron.training")
    return training is not None and os.path.exists(os.path.join(training, "models", "gpt.py"))


def transformer_config(model_config: Any) -> Any:
    """The TransformerConfig of what upstream gives a function that makes layer specs.

    That is a GPTModelConfig (since 0.19) or, before, the TransformerConfig itself. Goes with
    ``compat_older``.
    """
    return getattr(model_config, "transformer", model_config)


def default_layer_spec(model_config: Any, vp_stage: int | None) -> Any:
    """The layers that upstream builds by itself: a layer's spec, or a block's.

    Touches ``megatron.training.models.gpt.default_layer_spec`` (since 0.19). Can go when upstream
    offers it to others than its builder.

    Args:
        model_config: see ``transformer_config``.
        vp_stage: virtual pipeline stage.
    """
    if not describes_models():
        return compat_older.default_layer_spec(model_config, vp_stage)
    from megatron.training.models.gpt import default_layer_spec as upstream

    return upstream(model_config, vp_stage)


def take_function_for_layers() -> None:
    """Let ``--spec MODULE FUNCTION`` name a function; since 0.19 it may by itself.

    See ``compat_older.take_function_for_layers``, with which this goes.
    """
    if not describes_models():
        compat_older.take_function_for_layers()


def parse_and_validate_args(
    add: Callable[..., Any], defaults: dict[str, Any]
) -> argparse.Namespace:
    """Megatron's arguments, validated and set globally.

    Touches ``megatron.training.arguments.parse_and_validate_args`` (since 0.18; see
    ``compat_older`` for before, with which this goes).

    Args:
        add: adds flags to the parser.
        defaults: values for flags that are not given.
    """
    from megatron.training import arguments

    if not hasattr(arguments, "parse_and_validate_args"):
        return compat_older.parse_and_validate_args(add, defaults)
    return arguments.parse_and_validate_args(extra_args_provider=add, args_defaults=defaults)


def pretrain(
    args: argparse.Namespace,
    model: Any,
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    **options: Any,
) -> None:
    """Upstream's ``megatron.training.pretrain``.

    Its arguments are others in each version (see ``compat_older`` for before 0.19, with which this
    goes).

    Args:
        args: validated and global.
        model: see ``training.command_line.model_config``.
        datasets: builds the datasets.
        forward_step: runs the model on the next micro-batch.
        options: ``get_embedding_ranks``, and ``store`` if the process may restart by itself.
    """
    if not describes_models():
        compat_older.pretrain(args, model, datasets, forward_step, **options)
        return
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart
    from megatron.training import pretrain as upstream
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    if "store" in options:
        upstream, options["store"] = inprocess_restart.maybe_wrap_for_inprocess_restart(upstream)
    container = pretrain_cfg_container_from_args(args, model)
    upstream(container, datasets, ModelType.encoder_or_decoder, forward_step, **options)


def older_batch(data_iterator: Any, keys: tuple[str, ...], has_mtp: bool) -> dict[str, Any] | None:
    """The next micro-batch of whole sequences on this rank, before 0.19; None since.

    See ``compat_older.batch``, with which this goes.
    """
    if describes_models():
        return None
    return compat_older.batch(data_iterator, keys, has_mtp)


def mtp_on_this_rank(config: Any, vp_stage: int | None) -> bool:
    """Whether this rank predicts further tokens.

    Touches ``mtp_on_this_rank`` of ``megatron.core.transformer.multi_token_prediction``, which
    takes the TransformerConfig up to 0.17, and two fields of it since. Goes with ``compat_older``.

    Args:
        config: the TransformerConfig.
        vp_stage: virtual pipeline stage.
    """
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank as upstream

    options = {"ignore_virtual": False, "vp_stage": vp_stage}
    if "config" in inspect.signature(upstream).parameters:
        return upstream(config, **options)
    return upstream(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        **options,
    )


def build_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer of upstream's datasets.

    Touches where ``build_tokenizer`` lies: ``megatron.core.tokenizers.utils`` (since 0.17; see
    ``compat_older`` for before, with which this goes).
    """
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as upstream
    except ModuleNotFoundError:
        return compat_older.build_tokenizer(args)
    return upstream(args)


def ddp_config(args: argparse.Namespace) -> Any:
    """Megatron's DistributedDataParallelConfig for validated arguments.

    Touches ``megatron.training.training.get_megatron_ddp_config`` (since 0.18; see ``compat_older``
    for before, with which this goes).
    """
    from megatron.training import training

    if not hasattr(training, "get_megatron_ddp_config"):
        return compat_older.ddp_config(args)
    return training.get_megatron_ddp_config(args)


@functools.cache
def takes_output_processor() -> bool:
    """Whether a GPT hands its last hidden states to a loss head of the caller's.

    Asks the signature of ``GPTModel.forward`` for ``output_processor`` (since 0.18). Can go with
    0.17.
    """
    from megatron.core.models.gpt import GPTModel

    return "output_processor" in inspect.signature(GPTModel.forward).parameters


def is_mtp_layer(layer: torch.nn.Module) -> bool:
    """Whether the layer belongs to multi-token prediction.

    Touches ``TransformerLayer.is_mtp_layer`` (since 0.17; before, nothing tells such a layer, and
    memo refuses models that have any). Goes with ``compat_older``.
    """
    return bool(getattr(layer, "is_mtp_layer", False))
