"""Which layers `--pipeline-model-parallel-layout` gives to each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelChunk:
    """What a pipeline stage has of the model at a time.

    Attributes:
        layers: of the decoder.
        predicting: of multi-token prediction.
        embedding, loss: it has them.
    """

    layers: int
    predicting: int
    embedding: bool
    loss: bool


def layout_of(layout: Any, stages: int) -> list[list[ModelChunk]]:
    """Stage -> model chunk.

    Args:
        layout: Megatron's argument, the words of the flag or what Megatron made of them.
        stages: pipeline ranks.

    Raises:
        ValueError: Megatron does not understand it, or it is not a multiple of the stages.
    """
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if not hasattr(layout, "layout"):
        try:
            layout = PipelineParallelLayerLayout(layout, stages)
        except AssertionError as refused:
            raise ValueError(f"--pipeline-model-parallel-layout {layout}: {refused}") from None
    rows: list[list[list[Any]]] = layout.layout
    return [[_chunk([part.name for part in parts]) for parts in row] for row in rows]


def _chunk(parts: list[str]) -> ModelChunk:
    return ModelChunk(
        layers=parts.count("decoder"),
        predicting=parts.count("mtp"),
        embedding="embedding" in parts,
        loss="loss" in parts,
    )
