"""The losses of multi-token prediction in token chunks, as the main loss is (see loss_head).

Upstream classifies the hidden states of each further token, over the whole sequence, before the
model's `output_processor` is asked. Its own function runs here as well; of the logits it gets
something that stands for them, and what it would do with logits is done chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_memo import compat
from megatron_memo.training.loss_head import LossHead, cut

_head: LossHead | None = None


@contextmanager
def predictions_by(head: LossHead | None) -> Iterator[None]:
    """While the body runs, a model's losses of further tokens are computed by `head`.

    Args:
        head: None leaves them to upstream.
    """
    global _head
    before, _head = _head, head
    try:
        yield
    finally:
        _head = before


@dataclass
class _Unclassified:
    """Stands for the logits of one prediction.

    Attributes:
        hidden: [s / tp, b, h] under sequence parallelism, else [s, b, h].
        weight: of the classifier, or None for its own.
        best: token with the highest logit, chunk by chunk, [rows of all ranks, b] each.
    """

    hidden: Tensor
    weight: Tensor | None
    best: list[Tensor] = field(default_factory=list)


class _Classifier:
    """Upstream's output layer as `process_mtp_loss` uses it, but for the product."""

    def __init__(self, real: Any):
        self._real = real

    def __call__(
        self, hidden: Tensor, weight: Tensor | None = None, **_gather: Any
    ) -> tuple[_Unclassified, None]:
        return _Unclassified(hidden, weight), None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _process(upstream: Callable[..., Tensor], **given: Any) -> Tensor:
    """Stands for upstream's `process_mtp_loss`, whose arguments these are."""
    head = _head
    if head is None:
        return upstream(**given)
    real, real_loss = given["output_layer"], given["compute_language_model_loss"]
    gather, scale = given["runtime_gather_output"], given.get("scale_logits_fn")

    def token_losses(labels: Tensor, unclassified: _Unclassified) -> Tensor:
        in_forward = given["is_training"]

        def chunk_losses(chunk_labels: Tensor, logits: Tensor) -> Tensor:
            losses = real_loss(chunk_labels, logits)
            if in_forward:
                # After the loss, as upstream, which has its softmax in the logits' place by then.
                best = compat.mtp_best_tokens(logits, real, gather, given.get("tp_group"))
                unclassified.best.append(best)
            return losses

        losses = head(
            hidden_states=unclassified.hidden,
            output_layer=real,
            output_weight=unclassified.weight,
            labels=labels,
            compute_language_model_loss=chunk_losses,
            scale_logits=(lambda logits: logits) if scale is None else scale,
            runtime_gather_output=gather,
        )
        in_forward = False  # backward runs the chunks again
        return losses

    return upstream(
        **given
        | dict(
            output_layer=_Classifier(real),
            compute_language_model_loss=token_losses,
            scale_logits_fn=None,
        )
    )


def _count(
    upstream: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor | _Unclassified,
    labels: Tensor,
    mask: Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Stands for upstream's `_compute_mtp_acceptance_counts`: tokens predicted, tokens in all."""
    if not isinstance(logits, _Unclassified):
        return upstream(logits, labels, mask, *rest, **named)
    local = logits.hidden.shape[0]
    chunks = cut(len(logits.best), labels.shape[1] // local, local)
    best = torch.empty(labels.shape[::-1], dtype=torch.long, device=labels.device)
    for rows, part in zip(chunks, logits.best, strict=True):
        view = rows.view(best)
        view.copy_(part.reshape(view.shape))
    counts = mask.bool()
    return ((best.transpose(0, 1) == labels) & counts).sum().float(), counts.sum().float()


compat.change_mtp_loss(_process, _count)
