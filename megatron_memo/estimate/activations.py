"""Bytes that one layer saves for backward, for one micro-batch on one rank, by what it is.

In units of b*s*h/tp elements (`Job.unit_bytes`): 16 for a GPT-style layer, as in the MEMO paper; 17
for Llama-3-8B's shape, as seen in a trace of Megatron's own layer with fused RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_memo.estimate.job import Job

_LOG_SUM_EXP_BYTES = 4  # fp32, one a query head and token


@dataclass(frozen=True)
class Saved:
    """Bytes of one layer and micro-batch on one rank.

    Attributes:
        input: the layer's input.
        attention: its attention output.
        statistics: the attention's log-sum-exp, which travels with its output.
        norm: the input norm's output.
        qkv: q, k and v.
        post: attention residual, second norm's output, the MLP's two inner activations.
    """

    input: int
    attention: int
    statistics: int
    norm: int
    qkv: int
    post: int

    @property
    def always(self) -> int:
        """What goes to host memory whatever alpha is."""
        return self.input + self.attention + self.statistics

    @property
    def others(self) -> int:
        """What alpha is a fraction of."""
        return self.norm + self.qkv + self.post

    @property
    def total(self) -> int:
        return self.always + self.others


def saved(job: Job, layer: int) -> Saved:
    """What a layer, from 1, saves."""
    element = job.element_bytes
    row = job.local_tokens * job.hidden * element
    q, kv = (job.tokens * columns * element // job.tp for columns in (job.query, job.key))
    kv *= max(1, job.tp // job.groups)  # heads are repeated where ranks outnumber them
    statistics = job.tokens * job.heads // job.tp * _LOG_SUM_EXP_BYTES
    ffn = job.ffn
    if job.has_experts(layer):
        assert job.experts is not None
        ffn = job.experts.topk * job.experts.ffn + job.experts.shared_ffn
    inner = job.tokens * ffn * element // job.tp
    return Saved(
        input=row,
        attention=q,
        statistics=statistics,
        norm=row,
        qkv=q + 2 * kv,
        post=2 * row + inner * (3 if job.gated else 2),
    )
