"""Phase markers for what memo's layer does not mark itself: embedding, head, stock layers, steps.

Forward markers are module hooks, backward ones hooks on the output's gradient. Neither adds a node
to the graph nor allocates anything. Passes without gradients (evaluation) are not marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_memo import compat, phases
from megatron_memo.layer.transformer_layer import MemoTransformerLayer
from megatron_memo.phases import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    HEAD,
    LAYER,
    OPTIMIZER,
    START,
    UPDATE,
    Phase,
)

Undo = Callable[[], None]


def mark_model(chunks: Sequence[nn.Module]) -> Undo:
    """Hooks markers into the model.

    Args:
        chunks: model chunks of this rank (one, or one for each virtual pipeline stage), wrapped as
            Megatron's training holds them.

    Returns:
        A function that takes the hooks out again.
    """
    handles: list[Any] = []
    for chunk in chunks:
        handles += _mark_chunk(_unwrapped(chunk))

    def undo() -> None:
        while handles:
            handles.pop().remove()

    return undo


def mark_updates() -> Undo:
    """Marks where any optimizer's own step begins. Returns a function that ends it."""
    update = Phase(UPDATE)

    def enter(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        phases.enter(update)

    return register_optimizer_step_pre_hook(enter).remove


def mark_steps() -> None:
    """Marks where a training step begins and where its optimizer does, from the next step on."""
    mark_updates()

    def step(_iteration: int, run: Callable[[], Any]) -> Any:
        phases.begin_iteration()
        return run()

    compat.wrap_train_step(step, forward_backward)


def forward_backward(_iteration: int, run: Callable[[], Any]) -> Any:
    """Runs a step's forward and backward, and marks that the optimizer's part begins after it."""
    result = run()
    phases.enter(Phase(OPTIMIZER))
    return result


def _mark_chunk(model: Any) -> list[Any]:
    """Hooks of one GPTModel: parts that this pipeline stage does not have are skipped."""
    staged = model.config.virtual_pipeline_model_parallel_size is not None
    stage: int | None = model.vp_stage if staged else None

    def begin(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            phases.begin_micro_batch(stage)

    def phase(part: str, direction: str, layer: int | None = None) -> Phase:
        return Phase(part, direction, phases.current_micro_batch(stage), layer, None, stage)

    def on_enter(part: str, layer: int | None = None) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            if torch.is_grad_enabled():
                phases.enter(phase(part, FORWARD, layer))

        return hook

    def on_exit(part: str, layer: int | None = None) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            output = outputs[0] if isinstance(outputs, tuple) else outputs
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(_enters, phase(part, BACKWARD, layer)))

        return hook

    def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if torch.is_grad_enabled():
            phases.enter(START)  # what a pipeline stage does between two passes

    handles = [model.register_forward_pre_hook(begin)]

    def mark(module: nn.Module | None, part: str, layer: int | None = None) -> None:
        if module is not None:
            handles.append(module.register_forward_pre_hook(on_enter(part, layer)))
            handles.append(module.register_forward_hook(on_exit(part, layer)))

    mark(getattr(model, "embedding", None), EMBEDDING)
    for layer in model.decoder.layers:
        if isinstance(layer, TransformerLayer) and not isinstance(layer, MemoTransformerLayer):
            mark(layer, LAYER, layer.layer_number)
    if model.post_process:
        first_of_head = model.decoder.final_layernorm or model.output_layer
        handles.append(first_of_head.register_forward_pre_hook(on_enter(HEAD)))
        handles.append(model.register_forward_hook(on_exit(HEAD)))
    else:
        handles.append(model.register_forward_hook(leave))
    return handles


def _enters(phase: Phase, _grad: Tensor) -> None:
    phases.enter(phase)


def _unwrapped(module: Any) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    return module
