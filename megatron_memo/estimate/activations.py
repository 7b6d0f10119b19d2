"""Bytes that one layer saves for backward, for one micro-batch on one rank, by where it is read.

The tensors are those of `layer.footprint`; a mixture of experts gets as many tokens on each rank.
In units of b*s*h/tp elements (`Job.unit_bytes`) that is 16 for a GPT-style layer, as in the MEMO
paper, and 17 for Llama-3-8B's shape, as seen in a trace of Megatron's own layer with fused RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_memo.config import Experts
from megatron_memo.estimate.job import Job
from megatron_memo.layer.footprint import footprint
from megatron_memo.layer.shape import ExpertShape, LayerShape


@dataclass(frozen=True)
class Saved:
    """Bytes of one layer and micro-batch on one rank.

    Attributes:
        input: the layer's input.
        attention: its attention output.
        statistics: the attention's log-sum-exp, which travels with its output.
        qkv: q, k and v.
        pre: what else is saved before attention: the norm's output, RoPE's tables.
        post: what is saved after attention: residual, norm, the MLP's inner activations.
        experts: what a mixture of experts saves that is not kept on the device.
    """

    input: int
    attention: int
    statistics: int
    qkv: int
    pre: int
    post: int
    experts: int = 0

    @property
    def always(self) -> int:
        """What goes to host memory whatever alpha is."""
        return self.input + self.attention + self.statistics + self.experts

    @property
    def others(self) -> int:
        """What alpha is a fraction of."""
        return self.qkv + self.pre + self.post

    @property
    def total(self) -> int:
        return self.always + self.others


def saved(job: Job, layer: int, *, on_cuda: bool = True, experts: Experts = Experts.SWAP) -> Saved:
    """What a layer, from 1, saves.

    Args:
        job: sizes and layout.
        layer: only the MLP may differ between layers.
        on_cuda: whose kernels run.
        experts: what becomes of what a mixture of experts saves.
    """
    shape = layer_shape(job, layer, on_cuda=on_cuda)
    element = job.element_bytes
    row = job.local_tokens * job.hidden * element
    attention = job.tokens * shape.output * element
    whole, without = footprint(shape, experts), footprint(shape, Experts.KEEP)
    # RoPE, latents and norms of queries and keys come before attention, all else that varies
    # after it.
    plain = footprint(replace(shape, rotary_dim=0, qk_norm=False, latent=None), Experts.KEEP)
    columns = shape.query + shape.key + shape.value
    qkv = job.tokens * columns * element
    heads = shape.heads * shape.head_dim + 2 * shape.groups * shape.head_dim
    pre = row + whole.others - plain.others - job.tokens * (columns - heads) * element
    return Saved(
        input=row,
        attention=attention,
        statistics=without.always - row - attention,
        qkv=qkv,
        pre=pre,
        post=whole.others - qkv - pre,
        experts=whole.always - without.always,
    )


def layer_shape(job: Job, layer: int, *, on_cuda: bool = True) -> LayerShape:
    """The shape of a layer, from 1, as `layer.footprint` has it."""
    return LayerShape(
        tokens=job.sequence // job.cp,
        hidden=job.hidden,
        ffn=job.ffn // job.tp,
        heads=job.heads // job.tp,
        groups=max(job.groups // job.tp, 1),
        head_dim=job.head_dim,
        itemsize=job.element_bytes,
        shared_by=job.tp if job.sequence_parallel else 1,
        batch=job.micro_batch,
        rms_norm=job.rms_norm,
        qk_norm=job.qk_norm,
        rotary_dim=job.saved_rope,
        gated=job.gated,
        fused_activation=job.fused_activation,
        dropout=job.dropout,
        on_cuda=on_cuda,
        latent=job.latent,
        experts=_expert_shape(job) if job.has_experts(layer) else None,
    )


def _expert_shape(job: Job) -> ExpertShape:
    moe = job.experts
    assert moe is not None
    return replace(
        moe.shape or ExpertShape(moe.count, moe.topk, moe.ffn, moe.count),
        count=moe.count,
        topk=moe.topk,
        ffn=moe.ffn // job.expert_tp,
        local=moe.count // moe.parallel,
        tp=job.expert_tp,
        shared_ffn=moe.shared_ffn // job.tp,
    )
