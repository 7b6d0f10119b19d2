"""The sizes of a layer that decide what it saves, from Megatron's arguments."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from megatron_memo.layer.chunks import layer_tokens, packs


@dataclass(frozen=True)
class LatentShape:
    """Multi-latent attention. Sizes are of one head, or whole where ranks repeat them.

    Attributes:
        q_rank: width of the latent queries; None where queries come from the hidden state.
        kv_rank: width of the latent that keys and values share.
        qk_dim: dimensions of a query or key without a position.
        rope_dim: those with one.
        v_dim: of a value.
    """

    q_rank: int | None
    kv_rank: int
    qk_dim: int
    rope_dim: int
    v_dim: int

    @property
    def head_dim(self) -> int:
        """Of a query or key, as attention reads them."""
        return self.qk_dim + self.rope_dim


@dataclass(frozen=True)
class ExpertShape:
    """A layer's mixture of experts.

    Attributes:
        count: experts of the layer, on all ranks.
        topk: experts that a token visits.
        ffn: this rank's columns of an expert.
        local: experts on this rank.
        tp: ranks that split an expert, all of which work on all of its tokens.
        capacity: `--moe-expert-capacity-factor`: the most tokens of an expert, in those it gets if
            all get as many; None for no limit.
        padded: every expert is given as many tokens as its capacity is.
        shared_ffn: this rank's columns of the experts that every token visits; 0 without.
        shared_gate: their output has a gate.
        router_itemsize: bytes of a score.
        whole_scores: scores of all experts are kept, not only of the chosen ones.
        aux_loss, z_loss: losses that the router adds.
    """

    count: int
    topk: int
    ffn: int
    local: int
    tp: int = 1
    capacity: float | None = None
    padded: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    router_itemsize: int = 4
    whole_scores: bool = False
    aux_loss: bool = False
    z_loss: bool = False

    def visits(self, tokens: int) -> float:
        """Rows that this rank's experts work on for each of its own tokens, if the router gives all
        experts as many.

        Args:
            tokens: of this rank, all sequences of a micro-batch.
        """
        if self.capacity is None:
            return self.topk * self.tp
        of_expert = math.ceil(tokens * self.topk * self.capacity / self.count)
        most = of_expert * self.count / max(tokens, 1)
        return (most if self.padded else min(most, self.topk)) * self.tp


@dataclass(frozen=True)
class LayerShape:
    """What decides the size of a layer's saved tensors on one rank.

    Attributes:
        tokens: of one sequence that the rank's attention sees (its context-parallel share).
        shared_by: ranks that share these tokens outside of attention: tp under sequence
            parallelism, else 1.
        batch: sequences of a micro-batch; 1 where they are packed in one row of tokens.
        hidden: h.
        ffn: this rank's columns of the MLP: f/tp.
        heads: this rank's query heads.
        groups: this rank's key and value heads.
        head_dim: d.
        itemsize: bytes of an activation.
        rms_norm: RMSNorm, else LayerNorm.
        qk_norm: queries and keys are normalised.
        rotary_dim: dimensions of a head that RoPE turns, where cosines and sines are saved (not
            fused); 0 otherwise.
        gated: the MLP's activation is gated (SwiGLU): fc1 has 2f columns.
        fused_activation: bias, activation and gate are one function that saves its input only.
        dropout: hidden dropout is above 0.
        on_cuda: CUDA's kernels (see `footprint`).
        latent: attention is multi-latent; then `groups` and `head_dim` are not looked at.
        experts: the MLP is a mixture of experts; then `ffn` is not looked at.
    """

    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    itemsize: int
    shared_by: int = 1
    batch: int = 1
    rms_norm: bool = False
    qk_norm: bool = False
    rotary_dim: int = 0
    gated: bool = False
    fused_activation: bool = False
    dropout: bool = False
    on_cuda: bool = True
    latent: LatentShape | None = None
    experts: ExpertShape | None = None

    @property
    def local_tokens(self) -> int:
        """Rows of the layer's input on this rank."""
        return self.tokens // self.shared_by

    @property
    def query(self) -> int:
        """Columns of this rank's queries."""
        return self.heads * (self.latent.head_dim if self.latent else self.head_dim)

    @property
    def key(self) -> int:
        """Columns of this rank's keys."""
        return self.query if self.latent else self.groups * self.head_dim

    @property
    def value(self) -> int:
        """Columns of this rank's values."""
        return self.heads * self.latent.v_dim if self.latent else self.key

    @property
    def output(self) -> int:
        """Columns of this rank's attention output."""
        return self.value if self.latent else self.query

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, *, on_cuda: bool, experts: bool = False
    ) -> LayerShape:
        """The shape that Megatron's validated arguments describe.

        Args:
            args: validated.
            on_cuda: whose kernels will run.
            experts: of a layer that has a mixture of experts.
        """
        tp = args.tensor_model_parallel_size
        heads = args.num_attention_heads
        grouped = getattr(args, "group_query_attention", False)
        groups = args.num_query_groups if grouped else heads
        rope = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
        saves_rope = rope and not getattr(args, "apply_rope_fusion", False)
        rotary_dim = int(args.kv_channels * args.rotary_percent) if saves_rope else 0
        latent = latent_shape(args)
        swiglu = bool(getattr(args, "swiglu", False))
        return cls(
            tokens=layer_tokens(args) // (getattr(args, "context_parallel_size", None) or 1),
            shared_by=tp if args.sequence_parallel else 1,
            batch=1 if packs(args) else args.micro_batch_size,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size // tp,
            heads=heads // tp,
            groups=max(groups // tp, 1),
            head_dim=args.kv_channels,
            itemsize=args.params_dtype.itemsize,
            rms_norm=args.normalization == "RMSNorm",
            qk_norm=bool(getattr(args, "qk_layernorm", False)),
            rotary_dim=latent.rope_dim if latent else rotary_dim,
            gated=swiglu or bool(getattr(args, "quick_geglu", False)),
            fused_activation=bool(args.bias_swiglu_fusion if swiglu else args.bias_gelu_fusion),
            dropout=args.hidden_dropout > 0,
            on_cuda=on_cuda,
            latent=latent,
            experts=expert_shape(args) if experts else None,
        )


def latent_shape(args: argparse.Namespace) -> LatentShape | None:
    """Of multi-latent attention; None without. Its own RoPE is never fused where memo runs.

    Args:
        args: Megatron's, validated or only parsed.
    """
    if not getattr(args, "multi_latent_attention", False):
        return None
    return LatentShape(
        q_rank=args.q_lora_rank,
        kv_rank=args.kv_lora_rank,
        qk_dim=args.qk_head_dim,
        rope_dim=args.qk_pos_emb_head_dim,
        v_dim=args.v_head_dim,
    )


def expert_shape(args: argparse.Namespace) -> ExpertShape:
    """Of the layers that have experts.

    Args:
        args: Megatron's, validated.
    """
    tp = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    ffn = getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size
    shared = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    coefficients = getattr(args, "moe_aux_loss_coeff", 0.0)
    if not isinstance(coefficients, list):
        coefficients = [coefficients]
    kinds = getattr(args, "moe_router_load_balancing_type", "aux_loss")
    softmax_later = getattr(args, "moe_router_score_function", "softmax") == "softmax" and not (
        getattr(args, "moe_router_pre_softmax", False)
    )
    return ExpertShape(
        count=args.num_experts,
        topk=getattr(args, "moe_router_topk", None) or 2,
        ffn=ffn // tp,
        local=args.num_experts // (getattr(args, "expert_model_parallel_size", None) or 1),
        tp=tp,
        capacity=getattr(args, "moe_expert_capacity_factor", None),
        padded=bool(getattr(args, "moe_pad_expert_input_to_capacity", False)),
        shared_ffn=shared // args.tensor_model_parallel_size,
        shared_gate=bool(getattr(args, "moe_shared_expert_gate", False)),
        router_itemsize=8 if getattr(args, "moe_router_dtype", None) == "fp64" else 4,
        whole_scores=not softmax_later,
        aux_loss=any(coefficients) and kinds not in ("none", "sinkhorn"),
        z_loss=getattr(args, "moe_z_loss_coeff", None) is not None,
    )


def layers_with_experts(args: argparse.Namespace) -> tuple[bool, ...]:
    """Whether each layer has a mixture of experts, in order.

    Args:
        args: Megatron's, validated or only parsed.

    Raises:
        ValueError: `--moe-layer-freq` is of another number of layers.
    """
    layers = args.num_layers
    if not getattr(args, "num_experts", None):
        return (False,) * layers
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(i % frequency == 0 for i in range(layers))
    if len(frequency) != layers:
        raise ValueError(f"--moe-layer-freq: has {len(frequency)} entries for {layers} layers.")
    return tuple(bool(has) for has in frequency)
