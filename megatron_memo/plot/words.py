"""What a figure of an estimate is of, in words."""

from __future__ import annotations

from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.table import tokens_words


def machine_words(costs: Costs) -> str:
    """Model, GPUs and layout."""
    job = costs.job
    return (
        f"{job.layers} layers of {job.hidden} on {job.ranks} x {costs.machine.gpu.name} "
        f"(tp {job.tp}, pp {job.pp}, cp {job.cp}, dp {job.dp})"
    )


def job_words(costs: Costs) -> str:
    """The same with the sequence's length."""
    return f"{tokens_words(costs.job.sequence)} tokens, {machine_words(costs)}"
