"""Which ranks of a run ask for the same memory, so that one trace serves them all.

Ranks differ by pipeline stage; by whether they are the first of their tensor-parallel group, which
reads the data and counts the parameters that all have; and under a distributed optimizer by the
pieces of parameters that they update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_memo import compat


@dataclass(frozen=True)
class Place:
    """A rank among others, as Megatron has set it up.

    Attributes:
        stage: its pipeline stage.
        alike: ranks of its stage in groups that ask for the same, each with its ranks in order.
        own: the group that the rank is in.
        stage_starts: the first rank of every stage.
        fingerprint: what of this decides the rank's requests; see `compat.rank_kind`.
    """

    stage: int
    alike: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    stage_starts: tuple[int, ...]
    fingerprint: dict[str, Any]


def place(chunks: list[torch.nn.Module]) -> Place:
    """Where this process stands; Megatron's groups and model are set up.

    Args:
        chunks: the rank's model chunks, wrapped by DDP.
    """
    from megatron.core import parallel_state as mpu

    rank = torch.distributed.get_rank()
    stage, stages = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_world_size(),
    )
    shares = compat.optimizer_shares(chunks)
    stage_of, tp_of, dp_of = _layout(stages)
    groups: dict[tuple[bool, Any], list[int]] = {}
    for other in range(torch.distributed.get_world_size()):
        if stage_of[other] == stage:
            share = shares[dp_of[other] if len(shares) > 1 else 0]
            groups.setdefault((tp_of[other] == 0, share), []).append(other)
    own = next(ranks for ranks in groups.values() if rank in ranks)
    starts = tuple(min(r for r, s in enumerate(stage_of) if s == n) for n in range(stages))
    return Place(
        stage,
        tuple(tuple(ranks) for ranks in groups.values()),
        tuple(own),
        starts,
        compat.rank_kind(chunks),
    )


def _layout(stages: int) -> tuple[list[int], list[int], list[int]]:
    """Pipeline stage, tensor-parallel rank and data-parallel rank of every rank.

    Megatron numbers ranks tp, cp, dp, pp from fast to slow, or tp, cp, pp, dp.
    """
    from megatron.core import parallel_state as mpu
    from megatron.training import get_args

    args = get_args()
    tp, cp = mpu.get_tensor_model_parallel_world_size(), mpu.get_context_parallel_world_size()
    dp = mpu.get_data_parallel_world_size()
    stage_of, tp_of, dp_of = [], [], []
    for rank in range(torch.distributed.get_world_size()):
        rest, tp_rank = divmod(rank, tp)
        rest, cp_rank = divmod(rest, cp)
        if args.use_tp_pp_dp_mapping:
            dp_rank, stage = divmod(rest, stages)
        else:
            stage, dp_rank = divmod(rest, dp)
        stage_of.append(stage)
        tp_of.append(tp_rank)
        # The optimizer is spread over data and context parallel ranks together.
        dp_of.append(dp_rank * cp + cp_rank)
    return stage_of, tp_of, dp_of
