"""Floating-point operations, counted once as a multiply and once as an add.

All are of one rank and one forward pass of one micro-batch, unless a name says otherwise. Backward
is twice forward for a matrix product (gradients of input and weight), and for utilization also for
attention; flash attention's kernel does 2.5 times, since it computes the scores again
(`ATTENTION_BACKWARD`).
"""

from __future__ import annotations

from megatron_memo.estimate.job import Job

ATTENTION_BACKWARD = 2.5
MFU_FORMULA = (
    "MFU = 3 x (linear + head + attention) / (seconds x GPUs x dense rate); attention "
    "4 x b x s^2 x heads x head_dim a layer if full, half of that if causal"
)


def attention(job: Job, *, causal: bool) -> float:
    """2*b*s^2*(q + o)/(tp*cp), o the output's columns: scores and their product with v over all
    heads; half if causal."""
    columns = job.query + job.attended
    full = 2.0 * job.micro_batch * job.sequence**2 * columns / (job.tp * job.cp)
    return full / 2 if causal else full


def qkv(job: Job) -> float:
    """2*t*h*(q + 2*kv)/tp, t the rank's tokens; of latents, all projections down and up."""
    return 2.0 * job.tokens * sum(inner * columns for inner, columns in projections(job)) / job.tp


def projections(job: Job) -> list[tuple[int, int]]:
    """Inner size and columns, over all ranks, of the matrix products before attention."""
    latent = job.latent
    if latent is None:
        return [(job.hidden, job.query + job.key + job.value)]
    q, kv = latent.q_rank, latent.kv_rank
    queries = [(job.hidden, job.query)] if q is None else [(job.hidden, q), (q, job.query)]
    up = job.heads * (latent.qk_dim + latent.v_dim)
    return [*queries, (job.hidden, kv + latent.rope_dim), (kv, up)]


def projection(job: Job) -> float:
    """2*t*o*h/tp: attention's output projection, o its columns (q without latents)."""
    return 2.0 * job.tokens * job.attended * job.hidden / job.tp


def mlp(job: Job, layer: int) -> float:
    """2*t*h*f*(2, gated 3)/tp; for experts the topk that a token visits, and the shared ones."""
    matrices = 3 if job.gated else 2
    ffn = job.ffn
    if job.has_experts(layer):
        assert job.experts is not None
        ffn = job.experts.topk * job.experts.ffn + job.experts.shared_ffn
    return 2.0 * job.tokens * job.hidden * ffn * matrices / job.tp


def linear(job: Job, layer: int) -> float:
    """Everything in a layer that is linear in the tokens: 24*t*h^2/tp for f = 4h without a gate."""
    return qkv(job) + projection(job) + mlp(job, layer)


def head(job: Job) -> float:
    """2*t*h*V/tp: the output projection."""
    return 2.0 * job.tokens * job.hidden * job.vocabulary / job.tp


def of_iteration(job: Job, *, causal: bool) -> float:
    """Of the whole run in one iteration, forward and backward: what utilization is counted by.

    3 * (sum of layers' linear + attention, + head), over all ranks and micro-batches. What is
    recomputed does not count.
    """
    layers = sum(linear(job, i) for i in range(1, job.layers + 1))
    layers += job.layers * attention(job, causal=causal)
    ranks = job.tp * job.cp * job.dp
    return 3 * (layers + head(job)) * ranks * job.micro_batches


def mfu(job: Job, seconds: float, dense_rate: float, *, causal: bool) -> float:
    """Share of all GPUs' dense rate (operations a second) that the model's operations make up."""
    return of_iteration(job, causal=causal) / (seconds * job.ranks * dense_rate)
