"""Megatron's arguments as the fields of a `Job`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron_memo.estimate.job import CP_FLAG, PP_FLAG, TP_FLAG, Experts, check_divides
from megatron_memo.layer.layout import layout_of
from megatron_memo.layer.shape import (
    LatentShape,
    expert_shape,
    latent_shape,
    layers_with_experts,
)

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def fields(args: Any, world_size: int | None) -> dict[str, Any]:
    """`Job`'s fields by name.

    Args:
        args: Megatron's, validated or only parsed; what was not given is as Megatron makes it.
        world_size: GPUs; None takes `args.world_size`.

    Raises:
        ValueError: see `Job.from_args`.
    """
    if getattr(args, "yaml_cfg", None):
        raise ValueError("--yaml-cfg: the estimate does not know it yet. Give flags.")
    hidden = _needed(args, "hidden_size")
    heads = _needed(args, "num_attention_heads")
    layers = _needed(args, "num_layers")
    gated = bool(getattr(args, "swiglu", False))
    ffn = getattr(args, "ffn_hidden_size", None) or _default_ffn(hidden, gated)
    latent = latent_shape(args)
    head_dim = getattr(args, "kv_channels", None) or hidden // heads
    if latent is not None:
        head_dim = latent.head_dim
    grouped = latent is None and getattr(args, "group_query_attention", False)
    groups = (getattr(args, "num_query_groups", None) or heads) if grouped else heads
    tp, pp, cp = (
        getattr(args, name, None) or 1
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
    )
    for size, flag in ((tp, TP_FLAG), (pp, PP_FLAG), (cp, CP_FLAG)):
        if size < 1:
            raise ValueError(f"{flag} {size}: must be at least 1.")
    world = world_size if world_size is not None else _needed(args, "world_size")
    check_divides("the number of GPUs", world, f"{TP_FLAG} x {PP_FLAG} x {CP_FLAG}", tp * pp * cp)
    dp = world // (tp * pp * cp)
    micro_batch = _needed(args, "micro_batch_size")
    batch = getattr(args, "global_batch_size", None) or micro_batch * dp
    check_divides(
        "--global-batch-size", batch, "--micro-batch-size x data-parallel ranks", micro_batch * dp
    )
    layout = _layout(args, pp)
    precision = next((n for n in ("bf16", "fp16") if getattr(args, n, False)), "fp32")
    reduces_low = getattr(args, "grad_reduce_in_bf16", False)
    return dict(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        vocabulary=_vocabulary(args, tp),
        sequence=_needed(args, "seq_length"),
        micro_batch=micro_batch,
        micro_batches=batch // (micro_batch * dp),
        gated=gated,
        biases=bool(getattr(args, "add_bias_linear", True)),
        tied=not getattr(args, "untie_embeddings_and_output_weights", False),
        **_what_is_saved(args, head_dim, gated, latent),
        tp=tp,
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)) and tp > 1,
        pp=pp,
        virtual=len(layout[0]) if layout else _virtual(args, layers, pp),
        virtual_group=getattr(args, "microbatch_group_size_per_vp_stage", None),
        first_layers=getattr(args, "decoder_first_pipeline_num_layers", None),
        last_layers=getattr(args, "decoder_last_pipeline_num_layers", None),
        embedding_as_layer=bool(getattr(args, "account_for_embedding_in_pipeline_split", False)),
        loss_as_layer=bool(getattr(args, "account_for_loss_in_pipeline_split", False)),
        cp=cp,
        dp=dp,
        element_bytes=_ELEMENT_BYTES[precision],
        gradient_bytes=2 if reduces_low else 4,
        distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
        overlap_grad_reduce=bool(getattr(args, "overlap_grad_reduce", False)),
        overlap_param_gather=bool(getattr(args, "overlap_param_gather", False)),
        overlap_tp=bool(getattr(args, "tp_comm_overlap", False)),
        overlap_p2p=bool(getattr(args, "overlap_p2p_comm", False)),
        cp_kind=_cp_kind(args),
        experts=_experts(args, ffn, tp),
        latent=latent,
        layout=layout,
    )


def _what_is_saved(
    args: Any, head_dim: int, gated: bool, latent: LatentShape | None
) -> dict[str, Any]:
    """What of the layer's kernels decides its saved tensors; as `LayerShape.from_args`."""
    rope = getattr(args, "position_embedding_type", "rope") in ("rope", "yarn", "mrope")
    fused_rope = getattr(args, "apply_rope_fusion", False)
    percent = getattr(args, "rotary_percent", None) or 1.0
    fusion = "bias_swiglu_fusion" if gated else "bias_gelu_fusion"
    saved = int(head_dim * percent) if rope and not fused_rope else 0
    return dict(
        rope=rope or latent is not None,
        saved_rope=saved if latent is None else latent.rope_dim,
        rms_norm=getattr(args, "normalization", None) == "RMSNorm",
        qk_norm=bool(getattr(args, "qk_layernorm", False)),
        dropout=(getattr(args, "hidden_dropout", 0.0) or 0.0) > 0,
        fused_activation=bool(getattr(args, fusion, True)),
    )


def _needed(args: Any, name: str) -> int:
    value = getattr(args, name, None)
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        raise ValueError(f"{flag} is needed for an estimate. Give it.")
    if value < 1:
        raise ValueError(f"{flag} {value}: must be at least 1.")
    return value


def _default_ffn(hidden: int, gated: bool) -> int:
    """As Megatron's `validate_args` has it."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _vocabulary(args: Any, tp: int) -> int:
    padded = getattr(args, "padded_vocab_size", None)
    if padded:
        return padded
    entries = getattr(args, "vocab_size", None)
    if not entries:
        raise ValueError(
            "the size of the vocabulary is not known: give --vocab-size with --tokenizer-type "
            "NullTokenizer, or --padded-vocab-size."
        )
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        entries += 1  # the end of a document
    multiple = (getattr(args, "make_vocab_size_divisible_by", None) or 128) * tp
    return math.ceil(entries / multiple) * multiple


def _virtual(args: Any, layers: int, pp: int) -> int:
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if getattr(args, name, None):
            return getattr(args, name)
    of_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if not of_chunk:
        return 1
    check_divides("--num-layers", layers, PP_FLAG, pp)
    flag = "--num-layers-per-virtual-pipeline-stage"
    check_divides("the layers of a stage", layers // pp, flag, of_chunk)
    return layers // pp // of_chunk


def _cp_kind(args: Any) -> str:
    kind = getattr(args, "cp_comm_type", None) or "p2p"
    return kind if isinstance(kind, str) else kind[0]


def _layout(args: Any, pp: int) -> tuple[tuple[int, ...], ...] | None:
    given = getattr(args, "pipeline_model_parallel_layout", None)
    if not given:
        return None
    rows = layout_of(given, pp)
    places = [chunk for row in rows for chunk in row]
    if any(chunk.predicting for chunk in places):
        raise ValueError(
            f"--pipeline-model-parallel-layout {given}: the estimate does not know layers of "
            "multi-token prediction (m). Estimate without them."
        )
    if not (rows[0][0].embedding and rows[-1][-1].loss):
        raise ValueError(
            f"--pipeline-model-parallel-layout {given}: must begin with E and end with L."
        )
    return tuple(tuple(chunk.layers for chunk in row) for row in rows)


def _experts(args: Any, ffn: int, tp: int) -> Experts | None:
    if not getattr(args, "num_experts", None):
        return None
    every = layers_with_experts(args)
    one = argparse.Namespace(
        **{**vars(args), "ffn_hidden_size": ffn, "tensor_model_parallel_size": tp}
    )
    return Experts(
        count=args.num_experts,
        topk=getattr(args, "moe_router_topk", None) or 2,
        ffn=getattr(args, "moe_ffn_hidden_size", None) or ffn,
        shared_ffn=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        parallel=getattr(args, "expert_model_parallel_size", None) or 1,
        every=every,
        tp=getattr(args, "expert_tensor_parallel_size", None),
        shape=expert_shape(one),
    )
