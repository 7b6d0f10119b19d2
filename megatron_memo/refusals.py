"""What memo does not work with yet: every refused combination, as data.

A combination that would only break something silently (a mask that is not applied, a tensor that
two mechanisms claim) is refused before training starts, with what to change. The table is data so
that documentation and tests are generated from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_memo import platform
from megatron_memo.config import MemoConfig

Test = Callable[[argparse.Namespace], bool]


class Scope(Enum):
    """Which part of memo cannot work with the flag."""

    LAYER = "the memo layer"  # whenever a swap ratio is given
    ATTENTION = "memo's own modules"  # whenever they replace upstream's local ones
    EITHER = "memo"  # both


@dataclass(frozen=True)
class Refusal:
    """One refused flag.

    Attributes:
        flag: as the user wrote it.
        attribute: where Megatron's parsed arguments hold its value.
        test: true for arguments that are refused; missing attributes count as switched off.
        reason: the limit, as the rest of a sentence that begins with the flag.
        remedy: what to change, as a sentence.
        example: a command line that is refused; the tests run it through Megatron's parser.
        scope: which part of memo is concerned.
        on_cpu_only: the limit exists only on the CPU platform.
    """

    flag: str
    attribute: str
    test: Test
    reason: str
    remedy: str
    example: str
    scope: Scope = Scope.LAYER
    on_cpu_only: bool = False


def _get(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    return getattr(args, name, default)


def _above(name: str, limit: float) -> Test:
    return lambda args: (_get(args, name) or 0) > limit


def _given(name: str) -> Test:
    return lambda args: bool(_get(args, name))


def _is(name: str, value: Any) -> Test:
    return lambda args: _get(args, name) == value


def _context_parallel(args: argparse.Namespace) -> bool:
    return (_get(args, "context_parallel_size") or 1) > 1


def _not(name: str, value: Any) -> Test:
    return lambda args: _get(args, name, value) != value


# Upstream's name for recomputing core attention, so that its s x s scores are not kept. Memo's
# layer never keeps scores and runs attention once, so that there is nothing to do.
NO_SCORES = "core_attn"

_DROP = "Drop the flag, or train without --memo-swap-ratio."
_SAME_TENSORS = "would claim the same activations that memo moves and recomputes"
_SHARED_PACK = (
    "packs sequences of different lengths, and --context-parallel-size above 1 splits each of them "
    "over ranks, which memo's chunks and attention do not follow"
)
_NO_SHARED_PACK = (
    "Use --context-parallel-size 1, with --sequence-parallel and a larger "
    "--tensor-model-parallel-size."
)
_OTHER_LAYER = "builds layers of another kind than the dense one that memo takes apart"

REFUSALS: tuple[Refusal, ...] = (
    # ---- parallelism
    Refusal(
        "--cp-comm-type",
        "cp_comm_type",
        lambda args: (
            _context_parallel(args)
            and any(kind != "a2a" for kind in _get(args, "cp_comm_type", ()))
        ),
        "hands keys and values from rank to rank, and memo's own core attention trades heads for "
        "tokens between context-parallel ranks",
        "Give --cp-comm-type a2a, or use --transformer-impl transformer_engine.",
        "--context-parallel-size 2 --cp-comm-type p2p",
        Scope.ATTENTION,
    ),
    Refusal(
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        _given("hybrid_context_parallel"),
        "splits each packed sequence over as many ranks as it needs, which memo's chunks and "
        "attention do not follow",
        _DROP,
        "--hybrid-context-parallel",
        Scope.EITHER,
    ),
    Refusal(
        "--tp-comm-overlap",
        "tp_comm_overlap",
        _given("tp_comm_overlap"),
        "sizes its communication buffers for whole sequences, and memo works in token chunks",
        _DROP,
        "--tp-comm-overlap",
    ),
    Refusal(
        "--use-megatron-fsdp",
        "use_megatron_fsdp",
        _given("use_megatron_fsdp"),
        "frees a layer's parameters between uses, and recomputation uses them in between",
        "Use --use-distributed-optimizer instead.",
        "--use-megatron-fsdp",
    ),
    Refusal(
        "--use-torch-fsdp2",
        "use_torch_fsdp2",
        _given("use_torch_fsdp2"),
        "frees a layer's parameters between uses, and recomputation uses them in between",
        "Use --use-distributed-optimizer instead.",
        "--use-torch-fsdp2",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        "tensor_parallel_num_weight_shards",
        lambda args: (
            (_get(args, "tensor_parallel_num_weight_shards") or 0)
            > (_get(args, "tensor_model_parallel_size") or 1)
        ),
        "is above the tensor-parallel size, so weights are gathered for each use and memo's "
        "chunks would gather them many times",
        _DROP,
        "--tensor-parallel-num-weight-shards 2",
    ),
    # ---- other kinds of layers
    Refusal(
        "--moe-token-dispatcher-type",
        "moe_token_dispatcher_type",
        _is("moe_token_dispatcher_type", "flex"),
        "keeps buffers of its own from forward to backward, which memo cannot move",
        "Use --moe-token-dispatcher-type alltoall.",
        "--moe-token-dispatcher-type flex",
    ),
    Refusal(
        "--moe-shared-expert-overlap",
        "moe_shared_expert_overlap",
        _given("moe_shared_expert_overlap"),
        "computes on a stream of its own, and memo orders its copies by the main one",
        "Drop the flag: shared experts then run before the others.",
        "--moe-shared-expert-overlap",
    ),
    Refusal(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "overlap_dispatch_backward_with_experts_wgrad",
        _given("overlap_dispatch_backward_with_experts_wgrad"),
        "computes weight gradients later, on a stream of its own, when memo has given their "
        "inputs back",
        _DROP,
        "--overlap-dispatch-backward-with-experts-wgrad",
    ),
    Refusal(
        "--moe-paged-stash",
        "moe_paged_stash",
        _given("moe_paged_stash"),
        _SAME_TENSORS,
        "Drop the flag: --memo-moe-experts swap does that work.",
        "--moe-paged-stash",
    ),
    Refusal(
        "--moe-layer-recompute",
        "moe_layer_recompute",
        _given("moe_layer_recompute"),
        "would route tokens a second time, and " + _SAME_TENSORS,
        "Drop the flag: --memo-moe-experts recompute does that work, with routing saved.",
        "--moe-layer-recompute",
    ),
    Refusal(
        "--multi-latent-attention",
        "multi_latent_attention",
        lambda args: (
            bool(_get(args, "multi_latent_attention")) and bool(_get(args, "apply_rope_fusion"))
        ),
        "would rotate queries and keys by a fused kernel that knows no positions but the first, "
        "and memo works in token chunks",
        "Add --no-rope-fusion.",
        "--multi-latent-attention",
    ),
    Refusal(
        "--experimental-attention-variant",
        "experimental_attention_variant",
        _given("experimental_attention_variant"),
        _OTHER_LAYER,
        _DROP,
        "--experimental-attention-variant gated_delta_net",
    ),
    Refusal(
        "--attention-output-gate",
        "attention_output_gate",
        _given("attention_output_gate"),
        "adds a gate between attention and its projection that memo does not replay",
        _DROP,
        "--attention-output-gate",
    ),
    Refusal(
        "--encoder-num-layers / --decoder-num-layers",
        "decoder_num_layers",
        _given("decoder_num_layers"),
        "makes an encoder and a decoder joined by cross attention, which memo does not support",
        "Give --num-layers for a decoder-only model.",
        "--encoder-num-layers 2 --decoder-num-layers 2",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "hybrid_layer_pattern",
        _given("hybrid_layer_pattern"),
        _OTHER_LAYER,
        _DROP,
        "--hybrid-layer-pattern M*-",
    ),
    Refusal(
        "--hybrid-override-pattern",
        "hybrid_override_pattern",
        _given("hybrid_override_pattern"),
        _OTHER_LAYER,
        _DROP,
        "--hybrid-override-pattern M*-",
    ),
    Refusal(
        "--is-hybrid-model",
        "is_hybrid_model",
        _given("is_hybrid_model"),
        _OTHER_LAYER,
        _DROP,
        "--is-hybrid-model",
    ),
    Refusal(
        "--heterogeneous-layers-config-path",
        "heterogeneous_layers_config_path",
        _given("heterogeneous_layers_config_path"),
        "makes layers that differ, and memo plans one layer for all",
        _DROP,
        "--heterogeneous-layers-config-path layers.json",
    ),
    Refusal(
        "--heterogeneous-layers-config-encoded-json",
        "heterogeneous_layers_config_encoded_json",
        _given("heterogeneous_layers_config_encoded_json"),
        "makes layers that differ, and memo plans one layer for all",
        _DROP,
        "--heterogeneous-layers-config-encoded-json {}",
    ),
    Refusal(
        "--transformer-impl",
        "transformer_impl",
        _is("transformer_impl", "inference_optimized"),
        _OTHER_LAYER,
        "Use --transformer-impl transformer_engine or local.",
        "--transformer-impl inference_optimized",
    ),
    Refusal(
        "--fused-residual-rmsnorm",
        "fused_residual_rmsnorm",
        _given("fused_residual_rmsnorm"),
        "hands the residual from one layer to the next through the norm, past memo's chunks",
        _DROP,
        "--fused-residual-rmsnorm",
    ),
    Refusal(
        "--use-transformer-engine-op-fuser",
        "use_transformer_engine_op_fuser",
        _given("use_transformer_engine_op_fuser"),
        "fuses the modules that memo takes apart",
        _DROP,
        "--use-transformer-engine-op-fuser",
    ),
    Refusal(
        "--use-kitchen-attention",
        "use_kitchen_attention",
        _given("use_kitchen_attention"),
        "brings an attention kernel whose saved tensors memo does not know",
        _DROP,
        "--use-kitchen-attention",
    ),
    Refusal(
        "--modelopt-enabled",
        "modelopt_enabled",
        _given("modelopt_enabled"),
        "makes ModelOpt choose the layers",
        _DROP,
        "",
    ),
    # ---- packed sequences and masks
    Refusal(
        "--sft",
        "sft",
        lambda args: bool(_get(args, "sft")) and _context_parallel(args),
        _SHARED_PACK,
        _NO_SHARED_PACK,
        "--sft --context-parallel-size 2 --cp-comm-type a2a",
        Scope.EITHER,
    ),
    Refusal(
        "--dataloader-inter-document-masking",
        "dataloader_inter_document_masking",
        lambda args: (
            bool(_get(args, "dataloader_inter_document_masking")) and _context_parallel(args)
        ),
        _SHARED_PACK,
        _NO_SHARED_PACK,
        "--dataloader-inter-document-masking --context-parallel-size 2 --cp-comm-type a2a",
        Scope.EITHER,
    ),
    Refusal(
        "--rl-use-sequence-packing",
        "rl_use_sequence_packing",
        _given("rl_use_sequence_packing"),
        "packs sequences that it generated between training steps, through layers made for "
        "inference",
        _DROP,
        "--rl-use-sequence-packing",
    ),
    Refusal(
        "--reset-attention-mask",
        "reset_attention_mask",
        _given("reset_attention_mask"),
        "asks for a mask that stops at documents, and flash attention here is causal only, so "
        "the mask would be ignored",
        "Give --dataloader-inter-document-masking instead, which keeps documents apart without a "
        "mask, or drop the flag: attention then reaches across documents.",
        "--reset-attention-mask",
        Scope.ATTENTION,
    ),
    # ---- low precision
    Refusal(
        "--fp8-format",
        "fp8",
        _given("fp8"),
        "keeps scales that recomputation would advance twice",
        "Train with --bf16.",
        "--fp8-format hybrid",
    ),
    Refusal(
        "--fp4-format",
        "fp4",
        _given("fp4"),
        "keeps scales that recomputation would advance twice",
        "Train with --bf16.",
        "--fp4-format e2m1",
    ),
    Refusal(
        "--te-precision-config-file",
        "te_precision_config_file",
        _given("te_precision_config_file"),
        "chooses low precision by module, and its scales would be advanced twice",
        "Train with --bf16.",
        "--te-precision-config-file recipe.yaml",
    ),
    # ---- other managers of the same memory, and graphs
    Refusal(
        "--enable-cuda-graph",
        "enable_cuda_graph",
        _given("enable_cuda_graph"),
        "replays fixed work, and memo moves tensors between host and device inside it",
        _DROP,
        "--enable-cuda-graph",
    ),
    Refusal(
        "--external-cuda-graph",
        "external_cuda_graph",
        _given("external_cuda_graph"),
        "replays fixed work, and memo moves tensors between host and device inside it",
        _DROP,
        "--external-cuda-graph",
    ),
    Refusal(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        _not("cuda_graph_impl", "none"),
        "replays fixed work, and memo moves tensors between host and device inside it",
        "Use --cuda-graph-impl none, or train without --memo-swap-ratio.",
        "--cuda-graph-impl local",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        "cpu_offloading_num_layers",
        _above("cpu_offloading_num_layers", 0),
        _SAME_TENSORS,
        "Drop the flag: --memo-swap-ratio does that work.",
        "--cpu-offloading-num-layers 1",
    ),
    Refusal(
        "--cpu-offloading",
        "cpu_offloading",
        _given("cpu_offloading"),
        _SAME_TENSORS,
        "Drop the flag: --memo-swap-ratio does that work.",
        "",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        "fine_grained_activation_offloading",
        _given("fine_grained_activation_offloading"),
        _SAME_TENSORS,
        "Drop the flag: --memo-swap-ratio does that work.",
        "--fine-grained-activation-offloading",
    ),
    Refusal(
        "--recompute-granularity",
        "recompute_granularity",
        _is("recompute_granularity", "full"),
        _SAME_TENSORS,
        "Drop the flag: --memo-swap-ratio 0 recomputes every token, attention excepted.",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    Refusal(
        "--recompute-modules",
        "recompute_modules",
        lambda args: bool(set(_get(args, "recompute_modules") or ()) - {NO_SCORES}),
        "names parts of a layer whose activations memo moves and recomputes (core_attn is none)",
        "Drop the flag: --memo-swap-ratio 0 recomputes every token, attention excepted.",
        "--recompute-granularity selective --recompute-modules core_attn layernorm",
    ),
    Refusal(
        "--distribute-saved-activations",
        "distribute_saved_activations",
        _given("distribute_saved_activations"),
        _SAME_TENSORS,
        _DROP,
        "--distribute-saved-activations",
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "mlp_chunks_for_training",
        _above("mlp_chunks_for_training", 1),
        "cuts the MLP's tokens a second time",
        "Drop the flag and give --memo-chunks.",
        "--mlp-chunks-for-training 2",
    ),
    # ---- schedules that run parts of a layer apart
    Refusal(
        "--delay-wgrad-compute",
        "delay_wgrad_compute",
        _given("delay_wgrad_compute"),
        "computes weight gradients after backward, when memo has given their inputs back",
        _DROP,
        "--delay-wgrad-compute",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        _given("overlap_moe_expert_parallel_comm"),
        "runs the parts of a layer on a schedule of its own",
        _DROP,
        "--overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        "--save-activations-interval",
        "save_activations_interval",
        _given("save_activations_interval"),
        "hooks modules that memo runs once per chunk, and again to recompute",
        _DROP,
        "--save-activations-interval 10",
    ),
    Refusal(
        "--save-dgrads-interval",
        "save_dgrads_interval",
        _given("save_dgrads_interval"),
        "hooks modules that memo runs once per chunk, and again to recompute",
        _DROP,
        "--save-dgrads-interval 10",
    ),
    Refusal(
        "--perform-rl-step",
        "perform_rl_step",
        _given("perform_rl_step"),
        "generates text between training steps, through layers made for inference",
        _DROP,
        "--perform-rl-step",
    ),
    Refusal(
        "--inprocess-restart",
        "inprocess_restart",
        _given("inprocess_restart"),
        "abandons a step inside the process, while copies of that step may be under way",
        "Drop the flag: a restarted process resumes from its checkpoint as always.",
        "--inprocess-restart",
    ),
    # ---- attention that memo's own kernel does not have
    Refusal(
        "--window-size",
        "window_size",
        _given("window_size"),
        "asks for sliding-window attention, which memo's own core attention does not have",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--window-size 128,0",
        Scope.ATTENTION,
    ),
    Refusal(
        "--softmax-type",
        "softmax_type",
        _not("softmax_type", "vanilla"),
        "asks for a softmax that memo's own core attention does not have",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--softmax-type learnable",
        Scope.ATTENTION,
    ),
    Refusal(
        "--qk-clip",
        "qk_clip",
        _given("qk_clip"),
        "reads the largest attention logit, which memo's own core attention does not report",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--qk-clip",
        Scope.ATTENTION,
    ),
    Refusal(
        "--log-max-attention-logit",
        "log_max_attention_logit",
        _given("log_max_attention_logit"),
        "reads the largest attention logit, which memo's own core attention does not report",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--log-max-attention-logit",
        Scope.ATTENTION,
    ),
    Refusal(
        "--batch-invariant-mode",
        "batch_invariant_mode",
        _given("batch_invariant_mode"),
        "promises results that do not depend on the batch, from Transformer Engine's norms and "
        "one pinned flash attention kernel, which memo's own modules are not",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--batch-invariant-mode",
        Scope.ATTENTION,
    ),
    Refusal(
        "--position-embedding-type",
        "position_embedding_type",
        _is("position_embedding_type", "relative"),
        "adds a bias to attention's scores, which memo does not support",
        "Use --position-embedding-type rope.",
        "--position-embedding-type relative",
    ),
    Refusal(
        "--apply-layernorm-1p",
        "layernorm_zero_centered_gamma",
        _given("layernorm_zero_centered_gamma"),
        "asks for a zero-centred gamma, which memo's own norm does not have",
        "Use --transformer-impl transformer_engine, or drop the flag.",
        "--apply-layernorm-1p",
        Scope.ATTENTION,
    ),
    Refusal(
        "--attention-dropout",
        "attention_dropout",
        _above("attention_dropout", 0.0),
        "is above 0, and the CPU's flash attention kernel has no dropout",
        "Give --attention-dropout 0.",
        "--attention-dropout 0.1",
        Scope.ATTENTION,
        on_cpu_only=True,
    ),
)


def refused(args: argparse.Namespace, memo: MemoConfig | None) -> list[Refusal]:
    """The rows of ``REFUSALS`` that forbid these arguments, in the table's order.

    Args:
        args: Megatron's arguments, parsed; validated by Megatron or not.
        memo: None checks what memo's own modules need, for a run that uses them without a ratio.
    """
    own_modules = _get(args, "transformer_impl", "local") != "transformer_engine"
    concerned = {
        Scope.LAYER: memo is not None,
        Scope.ATTENTION: own_modules,
        Scope.EITHER: memo is not None or own_modules,
    }
    return [
        row
        for row in REFUSALS
        if concerned[row.scope] and (platform.on_cpu() or not row.on_cpu_only) and row.test(args)
    ]


def check_supported(args: argparse.Namespace, memo: MemoConfig | None) -> None:
    """Refuse what memo does not work with; see ``refused`` for the arguments.

    Raises:
        ValueError: one paragraph for each refused flag.
    """
    rows = refused(args, memo)
    if rows:
        raise ValueError("\n\n".join(_paragraph(row, args) for row in rows))


def _paragraph(row: Refusal, args: argparse.Namespace) -> str:
    value = _get(args, row.attribute)
    given = row.flag if value is True else f"{row.flag} {_text(value)}"
    return f"{given}: {row.scope.value} cannot work with it; it {row.reason}. {row.remedy}"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return str(value)
