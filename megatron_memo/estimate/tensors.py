"""Bytes of the tensors that a layer works with, from a job's shape alone; see `memory`'s NOTE."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_memo.estimate.job import Job

FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank; see `memory`'s NOTE.

    Attributes:
        tables: cosines and sines that a layer saves with its rotated q and k.
        activation_input: of the MLP's activation: `inner`, twice that with a gate.
        statistics: the attention's log-sum-exp.
        dq: fp32 accumulator of flash attention's backward.
        expanded: what grouped k and v take more when every query head has its own.
        logits: of the whole sequence with what cross entropy makes of them.
    """

    hidden: int
    whole: int
    query: int
    key: int
    inner: int
    activation_input: int
    statistics: int
    tables: int
    dq: int
    expanded: int
    logits: int

    @classmethod
    def of(cls, job: Job, layer: int) -> Sizes:
        """Those of a layer, from 1."""
        element, tokens = job.element_bytes, job.tokens
        heads, groups = job.heads // job.tp, max(job.groups // job.tp, 1)
        ffn = job.ffn
        if job.has_experts(layer):
            assert job.experts is not None
            ffn = job.experts.topk * job.experts.ffn + job.experts.shared_ffn
        query, key = (tokens * n * job.head_dim * element for n in (heads, groups))
        inner = tokens * ffn * element // job.tp
        table = job.sequence // job.cp * job.head_dim * element
        widths = job.vocabulary // job.tp * tokens
        return cls(
            hidden=job.local_tokens * job.hidden * element,
            whole=tokens * job.hidden * element,
            query=query,
            key=key,
            inner=inner,
            activation_input=inner * (2 if job.gated else 1),
            statistics=tokens * heads * FP32,
            tables=4 * table if job.rope else 0,
            dq=tokens * heads * -(-job.head_dim // 32) * 32 * FP32,
            expanded=2 * (query - key),
            logits=widths * (FP32 + (element if element < FP32 else 0)),
        )

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.key

    @property
    def rotated(self) -> int:
        """Rotated q and k with the tables, beside the projection's output."""
        return self.query + self.key + self.tables if self.tables else 0

    @property
    def always(self) -> int:
        """What a swapping layer moves whatever the ratio is: input, attention output."""
        return self.hidden + self.query + self.statistics

    @property
    def others(self) -> int:
        """What the ratio is a fraction of: two norms' outputs, q, k, v, residual, MLP."""
        return 3 * self.hidden + self.qkv + self.tables + self.mlp

    @property
    def mlp(self) -> int:
        """The activation's input and output."""
        return self.activation_input + self.inner

    @property
    def kept(self) -> int:
        """What Megatron's own layer keeps: two norms' outputs, two residuals (the second is its
        output), q, k, v before and after RoPE, attention output, MLP."""
        attention = self.qkv + self.rotated + self.query + self.statistics
        return 4 * self.hidden + attention + self.mlp
