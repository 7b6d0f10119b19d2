"""Bytes of the tensors that a layer works with, from a job's shape alone; see `memory`'s NOTE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_memo.config import Experts as Policy
from megatron_memo.estimate.activations import layer_shape
from megatron_memo.estimate.job import Experts, Job
from megatron_memo.layer.footprint import footprint
from megatron_memo.layer.shape import LayerShape

FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank; see `memory`'s NOTE.

    Attributes:
        attended: the attention's output, before its projection.
        tables: cosines and sines that a layer saves with its rotated q and k.
        norms: of queries and keys, and latents with theirs.
        gathered: of latents, what stock keeps besides: those of the other ranks.
        activation_input: of the MLP's activation: `inner`, twice that with a gate. Both are 0 of a
            layer with experts.
        statistics: the attention's log-sum-exp.
        dq: fp32 accumulator of flash attention's backward.
        latent: attention is multi-latent.
        expanded: what grouped k and v take more when every query head has its own.
        logits: of the whole sequence with what cross entropy makes of them.
        mixture: all that a mixture of experts saves, the router's input among it.
        dispatched: the tokens that this rank's experts get.
        spread: what holds them besides, as the layer's experts have all been through: on the way
            there and back.
        copied: of `dispatched`, what is copied to be moved.
        recomputed: of `mixture`, what is not moved where experts are run again.
    """

    hidden: int
    whole: int
    query: int
    key: int
    value: int
    attended: int
    inner: int
    activation_input: int
    statistics: int
    tables: int
    norms: int
    gathered: int
    dq: int
    expanded: int
    logits: int
    latent: bool = False
    mixture: int = 0
    dispatched: int = 0
    spread: int = 0
    copied: int = 0
    recomputed: int = 0

    @classmethod
    def of(cls, job: Job, layer: int) -> Sizes:
        """Those of a layer, from 1."""
        if not job.has_experts(layer):
            return cls._of_kind(job, 0)
        return cls._of_kind(job, job.experts.every.index(True) + 1 if job.experts else 0)

    @classmethod
    @lru_cache(maxsize=1 << 10)
    def _of_kind(cls, job: Job, layer: int) -> Sizes:
        """Layers differ by their experts only: `layer` has some, or is 0."""
        element, tokens, latent = job.element_bytes, job.tokens, job.latent
        shape = layer_shape(job, layer)
        query, key, value, attended = (
            tokens * columns * element
            for columns in (shape.query, shape.key, shape.value, shape.output)
        )
        inner = 0 if shape.experts else tokens * job.ffn * element // job.tp
        rotated = latent.rope_dim if latent else job.head_dim
        table = job.sequence // job.cp * rotated * element
        widths = job.vocabulary // job.tp * tokens
        return cls(
            hidden=job.local_tokens * job.hidden * element,
            whole=tokens * job.hidden * element,
            query=query,
            key=key,
            value=value,
            attended=attended,
            inner=inner,
            activation_input=inner * (2 if job.gated else 1),
            statistics=tokens * shape.heads * FP32,
            tables=4 * table if job.rope else 0,
            norms=_norms(shape),
            gathered=_gathered(shape),
            dq=tokens * shape.heads * -(-job.head_dim // 32) * 32 * FP32,
            expanded=0 if latent else 2 * (query - key),
            logits=widths * (FP32 + (element if element < FP32 else 0)),
            latent=latent is not None,
            **(_of_mixture(shape, job.experts) if shape.experts and job.experts else {}),
        )

    @property
    def qkv(self) -> int:
        return self.query + self.key + self.value

    @property
    def rotated(self) -> int:
        """Rotated q and k with the tables, beside the projection's output."""
        return self.query + self.key + self.tables if self.tables else 0

    @property
    def always(self) -> int:
        """What a swapping layer moves whatever the ratio is: input, attention output."""
        return self.hidden + self.attended + self.statistics

    @property
    def before(self) -> int:
        """What a chunk saves before attention, besides q, k and v."""
        return self.hidden + self.tables + self.norms

    @property
    def after(self) -> int:
        """What a chunk saves after attention."""
        return self.hidden + (0 if self.mixture else self.hidden + self.mlp)

    @property
    def others(self) -> int:
        """What the ratio is a fraction of: two norms' outputs, q, k, v, residual, MLP."""
        return self.before + self.qkv + self.after

    @property
    def mlp(self) -> int:
        """The activation's input and output."""
        return self.activation_input + self.inner

    @property
    def kept(self) -> int:
        """What Megatron's own layer keeps: two norms' outputs, two residuals (the second is its
        output), q, k, v before and after RoPE, attention output, MLP. Latents have no queries and
        keys before RoPE."""
        before = self.qkv + self.rotated
        if self.latent:
            before = self.qkv + self.tables + self.norms + self.gathered
        attention = before + self.attended + self.statistics
        return 3 * self.hidden + attention + (self.mixture or self.hidden + self.mlp)

    def moved_mixture(self, policy: Policy) -> int:
        """What of a mixture goes to host memory."""
        if policy is Policy.KEEP:
            return 0
        return self.mixture - (self.recomputed if policy is Policy.RECOMPUTE else 0)


def _norms(shape: LayerShape) -> int:
    """What latents, and norms of queries and keys, add to what a layer saves otherwise."""
    plain = replace(shape, latent=None, qk_norm=False)
    lost = 0
    if shape.latent is not None:
        head_dim = shape.latent.head_dim
        plain = replace(plain, head_dim=head_dim, groups=shape.heads)
        columns = shape.heads * (head_dim - shape.latent.v_dim)
        lost = columns * shape.tokens * shape.batch * shape.itemsize
    return footprint(shape).others - footprint(plain).others + lost


def _gathered(shape: LayerShape) -> int:
    latent = shape.latent
    if latent is None or latent.q_rank is None or shape.shared_by <= 2:
        return 0
    rows = shape.batch * shape.local_tokens * shape.itemsize
    return (shape.shared_by - 1) * latent.q_rank * rows


def _of_mixture(shape: LayerShape, experts: Experts) -> dict[str, int]:
    assert shape.experts is not None
    kept = footprint(shape, Policy.KEEP).always
    mixture, moved = (
        footprint(shape, policy).always - kept for policy in (Policy.SWAP, Policy.RECOMPUTE)
    )
    rows = shape.batch * shape.local_tokens
    one = round(shape.experts.visits(rows) * rows * shape.hidden * shape.itemsize)
    # Sorted by experts once where the tokens are, in an exchange, gathered by the ranks of an
    # expert; then one tensor an expert, and all of them in one.
    before = one // shape.experts.tp * (1 + (experts.parallel > 1))
    before += one if shape.experts.tp > 1 else 0
    after = 2 * one if shape.experts.local > 1 else one
    # The last of the first kind is what a single expert saves.
    spread = before + after - (one if shape.experts.local == 1 else 0)
    return {
        "mixture": mixture,
        "dispatched": one,
        "spread": spread,
        "copied": one if shape.experts.local > 2 else 0,
        "recomputed": mixture - moved,
    }
