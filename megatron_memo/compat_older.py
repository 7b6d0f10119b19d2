"""What megatron-core 0.16 to 0.18 have otherwise than 0.19: the second half of ``compat``.

Only ``compat`` calls this file, where the feature it asks for is missing. All of it can go when
0.19 is the oldest version that memo works with.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any


def default_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The layers that upstream's launch script builds by itself, as a block's spec.

    Touches ``get_gpt_decoder_block_spec`` of ``megatron.core.models.gpt.gpt_layer_specs`` (0.16 to
    0.18), which the script takes for models with experts and which makes the same dense layers.

    Args:
        config: a TransformerConfig.
        vp_stage: virtual pipeline stage.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if config.num_moe_experts is None:
        # A pattern of expert layers is read even where there are no experts.
        config = _with_dense_layers(config)
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )


def _with_dense_layers(config: Any) -> Any:
    dense = copy.copy(config)
    dense.moe_layer_freq = [0] * config.num_layers
    return dense


@functools.cache
def take_function_for_layers() -> None:
    """Let ``--spec MODULE FUNCTION`` name a function of (TransformerConfig, vp_stage).

    Touches ``megatron.core.transformer.transformer_block._get_block_submodules`` (0.16 to 0.18),
    which takes finished specs only: what the layers are made of depends on the configuration, which
    is not there yet when the name is looked up. 0.19 calls a function by itself.
    """
    from megatron.core.transformer import transformer_block

    upstream = transformer_block._get_block_submodules

    @functools.wraps(upstream)
    def with_functions(
        config: Any, spec: Any, vp_stage: int | None = None, *rest: Any, **named: Any
    ) -> Any:
        if isinstance(spec, FunctionType):
            spec = spec(config, vp_stage=vp_stage)
        return upstream(config, spec, vp_stage, *rest, **named)

    transformer_block._get_block_submodules = with_functions


def parse_and_validate_args(add: Callable[..., Any], defaults: dict[str, Any]) -> Namespace:
    """What ``megatron.training.arguments.parse_and_validate_args`` does since 0.18.

    Touches the functions that ``initialize_megatron`` calls for it in 0.16 and 0.17. The arguments
    are global afterwards, and `pretrain` does not parse them again.

    Args:
        add: adds flags to the parser.
        defaults: values for flags that are not given.
    """
    from megatron.training import arguments, checkpointing, global_vars

    args = arguments.parse_args(add)
    if args.use_checkpoint_args:
        if args.load is None and args.pretrained_checkpoint is None:
            raise ValueError(
                "--use-checkpoint-args: takes the model's shape from a checkpoint, and none is "
                "named. Give --load FOLDER or --pretrained-checkpoint FOLDER."
            )
        checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        checkpointing.load_args_from_checkpoint(args)
    arguments.validate_args(args, defaults)
    global_vars.set_global_variables(args)
    return args


def pretrain(
    args: Namespace,
    model_provider: Callable[..., Any],
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    **options: Any,
) -> None:
    """Upstream's ``megatron.training.pretrain`` of 0.16 to 0.18.

    Touches, in 0.16 and 0.17, what ``initialize_megatron`` finds in
    ``megatron.training.initialize`` to parse, validate and publish the command line: that has been
    done, and memo has changed some of it since. 0.18 takes a container of configs that is made from
    the arguments.

    Args:
        args: validated and global.
        model_provider: builds a model chunk.
        datasets: builds the datasets.
        forward_step: runs the model on the next micro-batch.
        options: ``store`` and ``get_embedding_ranks``.
    """
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, inprocess_restart
    from megatron.training import pretrain as upstream

    if "store" in options:
        upstream, options["store"] = inprocess_restart.maybe_wrap_for_inprocess_restart(upstream)
    given = (datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
    if hasattr(argument_utils, "pretrain_cfg_container_from_args"):
        # It warns of every model that is built by a function, which this version's own script does.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            container = argument_utils.pretrain_cfg_container_from_args(args)
        upstream(container, *given, **options)
        return
    from megatron.training import initialize, training

    whole = training.initialize_megatron
    done = ("validate_args", "load_args_from_checkpoint", "set_global_variables")

    @functools.wraps(whole)
    def without_arguments(*positional: Any, **named: Any) -> Any:
        kept = {name: getattr(initialize, name) for name in done}
        for name in done:
            setattr(initialize, name, lambda *_args, **_kwargs: None)
        try:
            return whole(*positional, **{**named, "parsed_args": args})
        finally:
            for name, function in kept.items():
                setattr(initialize, name, function)

    training.initialize_megatron = without_arguments
    try:
        upstream(*given, **options)
    finally:
        training.initialize_megatron = whole


def batch(
    data_iterator: Iterator[dict[str, Any]], keys: Iterable[str], has_mtp: bool
) -> dict[str, Any]:
    """The next micro-batch of whole sequences on this rank, ``keys`` to tensors or None.

    Touches ``get_batch_on_this_tp_rank``, which is ``megatron.core.utils``' since 0.18 and takes
    what the first rank has read, and ``megatron.training.utils``' before, and reads by itself; and
    ``megatron.core.utils.get_batch_on_this_cp_rank``.

    Args:
        data_iterator: where the first tensor-parallel rank reads.
        keys: of the batch.
        has_mtp: this rank predicts further tokens.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core import utils
    from megatron.training import get_args
    from megatron.training import utils as training_utils

    args = get_args()
    if hasattr(utils, "get_batch_on_this_tp_rank"):
        rank, found = mpu.get_tensor_model_parallel_rank(), {}
        if rank == 0:
            read = next(data_iterator)
            found = {key: _on_device(read.get(key)) for key in keys}
        found = utils.get_batch_on_this_tp_rank(
            found,
            is_sft=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=args.context_parallel_size,
            tp_rank=rank,
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=has_mtp,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
            is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        )
        shared = utils.get_batch_on_this_cp_rank(
            found, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    else:
        found = training_utils.get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=has_mtp)
        # The share of a context is taken of every entry.
        found = {key: value for key, value in found.items() if key in _OF_WHOLE_SEQUENCES}
        shared = utils.get_batch_on_this_cp_rank(found)
    return {key: shared.get(key) for key in keys}


_OF_WHOLE_SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def _on_device(value: Any) -> Any:
    return None if value is None else value.cuda(non_blocking=True)


def build_tokenizer(args: Namespace) -> Any:
    """The tokenizer of upstream's datasets.

    Touches ``megatron.core.tokenizers.text.utils.build_tokenizer`` and ``--legacy-tokenizer``
    (0.16; one folder up and without the flag since 0.17).
    """
    from megatron.training import get_tokenizer

    if args.legacy_tokenizer:
        return get_tokenizer()
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as upstream

    return upstream(args)


def name_missing_gemm(moe_utils: ModuleType) -> None:
    """Let routers of experts work without Transformer Engine.

    Touches ``megatron.core.transformer.moe.moe_utils.te_general_gemm`` (0.16), which is asked
    whether it is None and has no value where the import of Transformer Engine failed.
    """
    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def ddp_config(args: Namespace) -> Any:
    """The settings of Megatron's DDP that the arguments tell by the same names.

    Touches nothing private; ``megatron.training.training`` makes them inside ``get_model`` in 0.16
    and 0.17, and in a function of its own since.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    return DistributedDataParallelConfig(
        **{name: value for name, value in vars(args).items() if name in fields}
    )
