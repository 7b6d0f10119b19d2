"""The MEMO paper's own numbers and jobs, and what of the cost model follows from which of them.

Published numbers are from arXiv 2407.12117: v3 for all but the two marked v1. A K is 1024 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_memo.estimate import flops
from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import GIB, Machine, gpu
from megatron_memo.estimate.job import Job

K = 1024
# What the cost model is calibrated on.
SWAP_HIDES_FROM = 192 * K  # tokens, 7B on 8 GPUs
ATTENTION_SHARE, ATTENTION_SHARE_FROM = 0.90, 576 * K  # of a layer's forward, likewise
FLASH_2_FORWARD, FLASH_2_BACKWARD = 0.73, 0.63  # arXiv 2307.08691: of an A100's rate, at most
# What it predicts.
MFU_7B_AT_1M = 0.5230
MFU_65B_AT_1408K = 0.5145  # v1, 64 GPUs
LONGEST_7B = {"MEMO": 1024 * K, "Megatron-LM": 640 * K, "DeepSpeed": 256 * K}  # v1, 8 GPUs
# Follows from the paper's program without a cost model (DESIGN, section 1).
ALPHA_BY_HOST_GIB = {2048: 0.467, 1536: 0.314, 1024: 0.162}
LEAST_HOST_GIB = 480

# (layers, hidden, ffn, heads) of table 2, vocabulary 50257 padded for tp 8.
_SHAPES = {
    "7B": (32, 4096, 16384, 32),
    "13B": (40, 5120, 20480, 40),
    "30B": (48, 7168, 28672, 56),
    "65B": (80, 8192, 32768, 64),
}
_VOCABULARY = 51200


def job(name: str, tokens: int, *, tp: int = 8, cp: int = 1, pp: int = 1) -> Job:
    """One of the paper's models on one sequence an iteration, GPT style, in bf16.

    Tensor-parallel communication is taken to be hidden where Transformer Engine can, on which the
    paper builds; it does not say.
    """
    layers, hidden, ffn, heads = _SHAPES[name]
    return Job(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_dim=hidden // heads,
        groups=heads,
        vocabulary=_VOCABULARY,
        sequence=tokens,
        tp=tp,
        cp=cp,
        pp=pp,
        sequence_parallel=tp > 1,
        distributed_optimizer=True,
        overlap_tp=True,
        micro_batches=pp,
    )


def machine(host_gib: int = 2048) -> Machine:
    """A node of the paper's: 8 A800 80 GB, 2 TiB of host memory."""
    return Machine(gpu("a800-80g"), gpus=8, host_memory=host_gib * GIB)


def swap_hides_from(calibration: Calibration) -> float:
    """Tokens from which a copy of everything that a layer saves takes no longer than its forward.

    7B on 8 GPUs.
    """

    def hides(tokens: float) -> bool:
        costs = Costs(_7b(tokens), machine(), calibration)
        return costs.layer_forward() * costs.d2h >= costs.saved(1).total

    return _first(hides, 16 * K, 2048 * K)


def attention_share(tokens: float, calibration: Calibration) -> float:
    """Attention's share of a layer's forward, 7B on 8 GPUs."""
    costs = Costs(_7b(tokens), machine(), calibration)
    return costs.step("attention", 1).alone / costs.layer_forward()


def attention_dominates_from(calibration: Calibration) -> float:
    """Tokens from which attention is more than 90% of a layer's forward, 7B on 8 GPUs."""
    return _first(
        lambda tokens: attention_share(tokens, calibration) >= ATTENTION_SHARE, 16 * K, 4096 * K
    )


def derive(prior: Calibration | None = None) -> Calibration:
    """The calibration that meets the numbers marked as such above, given the priors.

    Both crossovers together: at 192K a layer's forward takes as long as its bytes on the link, and
    what is not attention in it grows with the tokens, to a ninth of attention at 576K.
    """
    known = prior or Calibration()
    costs = Costs(_7b(SWAP_HIDES_FROM), machine(), known)
    forward = costs.saved(1).total / costs.d2h
    others_per_attention = (1 - ATTENTION_SHARE) / ATTENTION_SHARE
    others_per_attention *= ATTENTION_SHARE_FROM / SWAP_HIDES_FROM
    attention = forward / (1 + others_per_attention)
    rate = flops.attention(costs.job, causal=True) / attention
    of_dense = rate / costs.machine.gpu.dense_rate
    nothing_hidden = replace(known, tp_hidden=0.0)
    open_costs = Costs(_7b(SWAP_HIDES_FROM), machine(), nothing_hidden)
    steps = [open_costs.step(kind, 1) for kind in ("pre", "post")]
    exposed = sum(step.serial for step in steps)
    too_long = sum(step.alone for step in steps) - attention * others_per_attention
    return replace(
        known,
        attention_forward=of_dense,
        attention_backward=of_dense * FLASH_2_BACKWARD / FLASH_2_FORWARD,
        tp_hidden=too_long / exposed,
    )


def _7b(tokens: float) -> Job:
    return job("7B", round(tokens / 64) * 64)


def _first(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from which `holds`, to a thousandth; `high` if it never does."""
    while high - low > low / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
