"""The memory of a run by profile, of the pipeline stage that needs most."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_memo.estimate.flags import has_flag, with_flag, without_flag
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Peak, peak_of
from megatron_memo.profile.process import profile_rank
from megatron_memo.profile.trace import read_trace
from megatron_memo.profile.words import EVEN_EXPERTS

# Fused kernels of Transformer Engine; plain ones ask for tensors of the same sizes.
_KERNELS = ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion")
_IMPLEMENTATION, _BUDGET = "--transformer-impl", "--memo-device-budget"


def profiled_peak(
    words: Sequence[str],
    job: Job,
    *,
    stage: int,
    device: str,
    device_bytes: int,
    tell: Callable[[str], None],
) -> Peak:
    """Profiles the first rank of a pipeline stage.

    Args:
        words: the run's flags. Transformer Engine's layers, which no profile can look into, are
            taken for local ones of the same shape; of experts each gets as many tokens.
        job: their layout.
        stage: which.
        device: "cuda" or "cpu", see `profile.session`.
        device_bytes: memory of the GPU, which settings like the loss head's chunks follow.
        tell: called with a few words as the profile gets on.

    Raises:
        ValueError: a mistake in the flags.
        ProfileFailed: Megatron failed.
    """
    flags = with_flag(words, _IMPLEMENTATION, "local")
    if job.experts is not None:
        flags = with_even_experts(flags)
    if not has_flag(words, _BUDGET):
        flags = with_flag(flags, _BUDGET, str(device_bytes))
    with tempfile.TemporaryDirectory(prefix="megatron-memo-") as folder:
        path = Path(folder) / "rank.trace.jsonl"
        profile_rank(
            flags,
            path,
            rank=stage * (job.ranks // job.pp),
            world_size=job.ranks,
            device=device,
            tell=tell,
        )
        return peak_of(read_trace(path))


def with_even_experts(words: Sequence[str]) -> list[str]:
    """The words with experts that all get as many tokens, and kernels that a profile can show."""
    kept = [word for word in words if word not in _KERNELS]
    if "--moe-pad-expert-input-to-capacity" in kept:
        return kept
    for flag in ("--moe-token-dispatcher-type", "--moe-expert-capacity-factor"):
        kept = without_flag(kept, flag)
    # Balanced by a loss or by none, they get as many here.
    kept = with_flag(kept, "--moe-router-load-balancing-type", "aux_loss")
    return [*kept, *EVEN_EXPERTS]
