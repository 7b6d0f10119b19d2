"""How Megatron gets the layer: specs over upstream's own layer specs.

Our norm and core attention stand in where upstream's local (plain torch) modules refuse to run or
build s x s scores; Transformer Engine's and Apex's modules stay.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_memo import compat, compat_versions
from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import describe, layer_tokens
from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.ops.core_attention import FlashCoreAttention
from megatron_memo.ops.norm import norm


def memo_spec(layer_spec: ModuleSpec, config, memo: MemoConfig | None) -> ModuleSpec:
    """An upstream layer spec with memo's layer, and our modules where upstream's do not do.

    Args:
        layer_spec: spec of a self-attention TransformerLayer, with or without experts; not changed.
        config: the TransformerConfig it will be built with.
        memo: None leaves upstream's layer and changes the modules only.

    Raises:
        ValueError: the spec's layer is not upstream's TransformerLayer.
    """
    if layer_spec.module is not TransformerLayer:
        raise ValueError(
            f"memo replaces megatron's TransformerLayer; this model's layer is "
            f"{getattr(layer_spec.module, '__name__', layer_spec.module)}, which is not supported. "
            "Train it without --memo-swap-ratio."
        )
    spec = copy.deepcopy(layer_spec)
    parts = spec.submodules
    parts.input_layernorm = _our_norm_for(parts.input_layernorm)
    parts.pre_mlp_layernorm = _our_norm_for(parts.pre_mlp_layernorm)
    attention = parts.self_attention.submodules
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):  # the last: multi-latent attention
        if hasattr(attention, name):
            setattr(attention, name, _our_norm_for(getattr(attention, name)))
    if attention.core_attention is DotProductAttention:
        attention.core_attention = FlashCoreAttention
    if memo is not None:
        spec.module = MemoTransformerLayer
        spec.params = {**(spec.params or {}), "memo": memo}
    return spec


@dataclass
class MemoBlockSubmodules(TransformerBlockSubmodules):
    """A block's layers by `block_spec`; layers of multi-token prediction follow its example.

    Attributes:
        memo: as `memo_spec` takes it.
    """

    memo: MemoConfig | None = None


def block_spec(
    model_config: Any, memo: MemoConfig | None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The block that upstream builds for `model_config`, with `memo_spec` for each layer.

    Args:
        model_config: upstream's GPTModelConfig, or before 0.19 its TransformerConfig.
        memo: None for upstream's layer over our modules.
        vp_stage: virtual pipeline stage.
    """
    config = compat_versions.transformer_config(model_config)
    upstream = compat_versions.default_layer_spec(model_config, vp_stage)
    if isinstance(upstream, TransformerBlockSubmodules):  # layers with and without experts
        return MemoBlockSubmodules(
            layer_specs=[memo_spec(layer, config, memo) for layer in upstream.layer_specs],
            layer_norm=_our_norm_for(upstream.layer_norm),
            memo=memo,
        )
    layer = memo_spec(upstream, config, memo)
    count = get_num_layers_to_build(config, vp_stage)
    return MemoBlockSubmodules(
        layer_specs=[layer] * count, layer_norm=_our_norm_for(LayerNormImpl), memo=memo
    )


def mtp_spec(spec: Any, block: Any, config: TransformerConfig) -> Any:
    """Upstream's spec of the multi-token prediction behind `block`, like the layers of that.

    Args:
        spec: upstream's MultiTokenPredictionBlockSubmodules, or None where there is none.
        block: spec of the model's layers; left alone unless it is one of `block_spec`.
        config: the TransformerConfig it will be built with.
    """
    if spec is None or not isinstance(block, MemoBlockSubmodules):
        return spec
    layers = []
    for layer in spec.layer_specs:
        parts = dataclasses.replace(
            layer.submodules,
            enorm=_our_norm_for(layer.submodules.enorm),
            hnorm=_our_norm_for(layer.submodules.hnorm),
            layer_norm=_our_norm_for(layer.submodules.layer_norm),
            mtp_model_layer=memo_spec(layer.submodules.mtp_model_layer, config, block.memo),
        )
        layers.append(dataclasses.replace(layer, submodules=parts))
    return dataclasses.replace(spec, layer_specs=layers)


compat.change_mtp_spec(mtp_spec)
compat_versions.take_function_for_layers()


def memo_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """For an unmodified script: `--spec megatron_memo.layer.spec memo_layer_spec`.

    The script does not know memo's flags; settings come from MEMO_SWAP_RATIO (default 0.5),
    MEMO_CHUNKS, MEMO_RESIDENT_LAYERS, MEMO_PREFETCH_DEPTH, MEMO_MOE_EXPERTS, MEMO_SYNC and
    MEMO_POISON.
    """
    from megatron.training import get_args, print_rank_0

    from megatron_memo.refusals import check_supported

    args, memo = get_args(), MemoConfig.from_env()
    config = compat_versions.transformer_config(model_config)
    check_supported(args, memo)
    if args.mtp_num_layers and not compat_versions.describes_models():
        raise ValueError(
            f"--mtp-num-layers {args.mtp_num_layers}: memo's layers predict further tokens from "
            f"Megatron core 0.19 on, and this is {compat_versions.version()}. Take 0.19 or newer, "
            "or drop the flag."
        )
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    layers = config.num_layers + (config.mtp_num_layers or 0)
    what = describe(memo, layer_tokens(args), ranks, layers, config.context_parallel_size)
    print_rank_0(f"megatron_memo: layers from --spec, {what}")
    return block_spec(model_config, memo, vp_stage)


def _our_norm_for(upstream: Any) -> Any:
    """Ours for upstream's torch norm, which refuses sequence parallelism; others stay."""
    return norm if upstream is WrappedTorchNorm else upstream
