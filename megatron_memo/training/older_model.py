"""A GPT for the training loop of core 0.16 to 0.18, which is given a function that builds it.

Same model as the launch script of those versions builds. Can go, with ``older_checks``, when 0.19
is the oldest version that memo works with: it builds a model from a description.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_memo import compat_versions


def model_provider(args: Namespace, layers: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """What upstream calls for each model chunk of this rank.

    Args:
        args: Megatron's, validated; what `older_checks` refuses has been refused.
        layers: (TransformerConfig, vp_stage=...) -> spec of the chunk's layers; None for those of
            ``--spec``, or upstream's own.

    Returns:
        A function of ``pre_process``, ``post_process`` and, by name, ``vp_stage``, ``config`` and
        ``pg_collection``.
    """

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.spec_utils import import_module
        from megatron.training import print_rank_0
        from megatron.training.arguments import core_transformer_config_from_args

        print_rank_0("building GPT model ...")
        config = core_transformer_config_from_args(args) if config is None else config
        if layers is not None:
            spec = layers(config, vp_stage=vp_stage)
        elif args.spec is not None:
            spec = import_module(args.spec)
        else:
            spec = compat_versions.default_layer_spec(config, vp_stage)
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )

    return provide
