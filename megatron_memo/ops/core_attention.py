"""Core attention module in upstream's shape, over flash kernels."""

from contextlib import nullcontext

from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_memo.ops.context_parallel import HeadExchange
from megatron_memo.ops.flash_attention import flash_attention
from megatron_memo.ops.packed import bounds_of, is_packed


class FlashCoreAttention(MegatronModule):
    """Stands in for upstream's DotProductAttention, which builds the s x s scores.

    Built by `megatron.core.transformer.attention.Attention` with the arguments below; it keeps no
    parameters, so state dicts are unchanged.

    Raises:
        ValueError: a mask or feature that causal flash attention does not have.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        **_unused_upstream_options,
    ):
        super().__init__(config=config)
        self.exchange = None
        if config.context_parallel_size > 1:
            if cp_comm_type not in (None, "a2a"):
                raise ValueError(
                    f"--cp-comm-type {cp_comm_type}: memo's own core attention trades heads for "
                    "tokens between context-parallel ranks. Give --cp-comm-type a2a, or use "
                    "--transformer-impl transformer_engine."
                )
            group = getattr(pg_collection, "cp", None)
            self.exchange = HeadExchange(group or parallel_state.get_context_parallel_group())
        if getattr(config, "window_size", None) is not None:
            raise ValueError(
                "--window-size: memo's own core attention has no sliding window. Use "
                "--transformer-impl transformer_engine."
            )
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise ValueError(
                f"--softmax-type {config.softmax_type}: memo's own core attention has the plain "
                "softmax only. Use --transformer-impl transformer_engine."
            )
        self.softmax_scale = (
            getattr(config, "softmax_scale", None) if softmax_scale is None else softmax_scale
        )
        # --apply-query-key-layer-scaling changes nothing here: it keeps upstream's fp16 scores
        # small (a factor 1/layer_number that the softmax takes back); flash kernels score in fp32.
        self.dropout_p = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """query [s, b, np, d], key [s, b, ng, d], value [s, b, ng, dv] -> [s, b, np*dv].

        Packed sequences come without b, as upstream hands them over: [t, np, d] and [t, ng, d] ->
        [t, np*d]. `attention_mask` is not read where the mask type is causal, as in upstream's
        Transformer Engine attention: the kernel knows the mask.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if kind not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(f"memo's own core attention is causal; {kind} was asked for")
        if attention_bias is not None:
            raise ValueError("memo's own core attention takes no attention bias")
        packed = is_packed(packed_seq_params)
        if packed and self.exchange is not None:
            raise ValueError(
                "memo's own core attention takes no packed sequences that context-parallel ranks "
                "share. Use --context-parallel-size 1."
            )
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        dropout_p = self.dropout_p if self.training else 0.0
        # Ranks hold different heads, so they drop with different random streams, as in upstream's
        # DotProductAttention; under sequence parallelism the block has switched to them already.
        switch = dropout_p > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if switch else nullcontext():
            out = flash_attention(
                query,
                key,
                value,
                softmax_scale=self.softmax_scale,
                dropout_p=dropout_p,
                causal=kind == AttnMaskType.causal,
                bounds=bounds_of(packed_seq_params, query.size(0)) if packed else None,
                exchange=self.exchange,
            )
        return out.squeeze(1) if packed else out
