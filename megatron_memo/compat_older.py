"""What megatron-core 0.16 to 0.18 have otherwise than 0.19: the second half of ``compat``.

Only ``compat`` calls this file, where the feature it asks for is missing. All of it can go when
0.19 is the oldest version that memo works with.
"""

from __future__ import annotations

import copy
import functools
from types import FunctionType
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
