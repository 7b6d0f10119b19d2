"""How many layers' activations a pipeline stage holds at once, by Megatron's schedules.

A micro-batch's activations are held from its forward to its backward; 1F1B and interleaved
schedules run some forwards before the first backward (source: `get_pp_rank_microbatches` and
`get_schedule_table` of megatron/core/pipeline_parallel/schedules.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_memo.layer.layout import layout_of


@dataclass(frozen=True)
class Held:
    """The stage that holds most, when it does.

    Attributes:
        stage: pipeline rank.
        layers: of the stage, those that swap.
        passes: (layer, micro-batch) pairs held at once; `layers` times the micro-batches in flight
            without virtual stages.
        weight: of these pairs, together.
    """

    stage: int
    layers: int
    passes: int
    weight: int


def most_held(
    args: argparse.Namespace, resident_layers: int, weight: Callable[[int], int] | None = None
) -> Held:
    """What the fullest stage holds.

    Args:
        args: Megatron's, validated.
        resident_layers: the model's last layers, which do not swap.
        weight: of a layer, by its number from 1, for one micro-batch; None weighs all alike.
    """
    stages = []
    for stage, chunks in enumerate(_swapping_layers(args, resident_layers)):
        passes = _peak([len(layers) for layers in chunks], stage, args)
        heavy = passes
        if weight is not None:
            heavy = _peak([sum(map(weight, layers)) for layers in chunks], stage, args)
        stages.append(Held(stage, sum(map(len, chunks)), passes, heavy))
    return max(stages, key=lambda held: held.weight)


def _peak(weights: list[int], stage: int, args: argparse.Namespace) -> int:
    """Most that is held, over one iteration of a stage whose model chunks weigh so much each."""
    order = list(_forwards(len(weights), _micro_batches(args), _group(args)))
    before = args.pipeline_model_parallel_size - stage - 1
    warmup = before if len(weights) == 1 else before * 2 + (len(weights) - 1) * _group(args)
    held = peak = 0
    for index, chunk in enumerate(order):
        held += weights[chunk]
        peak = max(peak, held)
        if index >= warmup:
            held -= weights[len(weights) - 1 - order[index - warmup]]
    return peak


def _forwards(chunks: int, micro_batches: int, group: int) -> Iterator[int]:
    """The model chunk of each forward; backwards come in the same order with chunks reversed."""
    for start in range(0, micro_batches, group):
        for chunk in range(chunks):
            yield from [chunk] * min(group, micro_batches - start)


def _micro_batches(args: argparse.Namespace) -> int:
    return max(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), 1)


def _group(args: argparse.Namespace) -> int:
    given = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return int(given or args.pipeline_model_parallel_size)


def _swapping_layers(args: argparse.Namespace, resident_layers: int) -> list[list[range]]:
    """Stage -> model chunk -> numbers of the layers that swap, from 1."""
    stages = args.pipeline_model_parallel_size
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    further = getattr(args, "mtp_num_layers", None) or 0  # of multi-token prediction, at the end
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout:
        per_chunk = [
            [chunk.layers + chunk.predicting for chunk in row] for row in layout_of(layout, stages)
        ]
    else:
        per_chunk = _layers_of_chunks(args, stages, chunks)
        per_chunk[-1][-1] += further
    last = args.num_layers + further - resident_layers
    found, first = [[range(0)] * chunks for _ in range(stages)], 1
    for chunk in range(chunks):
        for stage in range(stages):
            stop = first + per_chunk[stage][chunk]
            found[stage][chunk] = range(first, max(min(stop, last + 1), first))
            first = stop
    return found


def _layers_of_chunks(args: argparse.Namespace, stages: int, chunks: int) -> list[list[int]]:
    """Stage -> model chunk -> layers, as `get_num_layers_to_build` deals them out."""
    left, others = args.num_layers, stages
    fixed: dict[int, int] = {}
    for stage, name in ((0, "first"), (stages - 1, "last")):
        given = getattr(args, f"decoder_{name}_pipeline_num_layers", None)
        if given is not None:
            fixed[stage], left, others = given, left - given, others - 1
    # An embedding or a loss may count as a layer of the first or last stage.
    embedding = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(args, "account_for_loss_in_pipeline_split", False))
    each = (left + embedding + loss) // max(others, 1)
    found = [[fixed.get(stage, each) // chunks] * chunks for stage in range(stages)]
    found[0][0] -= embedding
    found[-1][-1] -= loss
    return found
