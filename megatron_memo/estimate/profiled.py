"""The memory of a run by profile, of the pipeline stage that needs most."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_memo.estimate.flags import has_flag, with_flag
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Peak, peak_of
from megatron_memo.profile.process import profile_rank
from megatron_memo.profile.trace import read_trace

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
            taken for local ones of the same shape.
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
