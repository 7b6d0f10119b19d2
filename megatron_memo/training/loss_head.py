"""The loss head in token chunks, as Megatron's GPT takes it: through its `output_processor`.

The final norm stays where it is. Output projection, logit scaling and cross entropy are upstream's
own functions, called on one chunk of tokens at a time, so that tied weights, vocabulary shards,
sequence parallelism and the fused cross entropies mean what they mean in stock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_memo import compat_versions
from megatron_memo.arguments import device_budget_from_args
from megatron_memo.layer.chunks import layer_tokens
from megatron_memo.layer.rows import Rows
from megatron_memo.ops.loss import chunked_loss

AUTO = "auto"
# Without a number from the user: stock's head while it takes at most this part of the device's
# memory, and else so many chunks that one takes at most the second part.
_SMALL_ENOUGH, _OF_A_CHUNK = 10, 64
_FP32_BYTES = 4


# What looks at the logits of the whole sequence, or at the output layer's own bookkeeping of one
# forward for each backward.
_WANTS_WHOLE_LOGITS = ("logits_save_dir", "logits_load_dir", "defer_embedding_wgrad_compute")


@dataclass(frozen=True)
class LossHead:
    """Computes token losses in `chunks` pieces; give it to the model as `output_processor`.

    Attributes:
        chunks: pieces of a sequence, at least 1 and at most a rank's tokens.
    """

    chunks: int

    def describe(self) -> str:
        """For the log; the word embedding follows the head (see training.embedding)."""
        embedding = ", embedding too" if self.chunks > 1 else ""
        return f"loss in {self.chunks} token chunks{embedding}"

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
        scale_logits: Callable[[Tensor], Tensor],
        runtime_gather_output: bool | None = None,
        **_rest: Any,
    ) -> Tensor:
        """Losses [b, s] of labels [b, s].

        Args:
            hidden_states: [s / tp, b, h] under sequence parallelism, else [s, b, h]; normed. Of
                context-parallel ranks each has its own s.
            output_layer: upstream's ColumnParallelLinear.
            output_weight: the tied embedding's weight, or None for the layer's own.
            compute_language_model_loss: upstream's, [b, s] and [s, b, v / tp] -> [b, s].
            scale_logits: upstream's (muP), the identity otherwise.
            _rest: what upstream passes and this head does not need.

        Raises:
            ValueError: more chunks than this rank has tokens.
        """
        assert labels is not None, "the loss head is for passes that have labels"
        assert output_layer.bias is None, "upstream's output layer has no bias"
        local = hidden_states.shape[0]
        ranks = labels.shape[1] // local

        def token_losses(hidden: Tensor, weight: Tensor, chunk_labels: Tensor) -> Tensor:
            logits, _ = output_layer(
                hidden, weight=weight, runtime_gather_output=runtime_gather_output
            )
            return compute_language_model_loss(chunk_labels, scale_logits(logits))

        weight = output_layer.weight if output_weight is None else output_weight
        return chunked_loss(
            token_losses, hidden_states, weight, labels, cut(self.chunks, ranks, local)
        )


def cut(chunks: int, ranks: int, local_tokens: int) -> list[Rows]:
    """Equal chunks (the lengths differ by at most one) of each rank's `local_tokens`.

    Raises:
        ValueError: more chunks than tokens.
    """
    _check_fits(chunks, local_tokens)
    edges = [local_tokens * k // chunks for k in range(chunks + 1)]
    return [Rows(ranks, local_tokens, start, stop) for start, stop in pairwise(edges)]


def head_of(args: Any, device_bytes: int | None) -> LossHead | None:
    """The head for Megatron's validated arguments and `--memo-loss-chunks`; None means stock's.

    Args:
        args: without a swap ratio memo is off, and its head with it.
        device_bytes: see `loss_head`.

    Raises:
        ValueError: see `loss_head`; also a number together with what needs whole logits.
    """
    if getattr(args, "memo_swap_ratio", None) is None:
        return None
    flag = getattr(args, "memo_loss_chunks", None)
    if not compat_versions.takes_output_processor():
        if flag in (None, AUTO):
            return None
        raise ValueError(
            f"--memo-loss-chunks {flag}: Megatron takes a loss head of memo's since core 0.18, and "
            f"this is {compat_versions.version()}. Drop the flag, or take a newer Megatron."
        )
    for attribute in _WANTS_WHOLE_LOGITS:
        if not getattr(args, attribute, None):
            continue
        if flag in (None, AUTO):
            return None
        other = "--" + attribute.replace("_", "-")
        raise ValueError(
            f"--memo-loss-chunks {flag}: {other} needs the logits of a whole sequence at once. "
            "Drop one of the two."
        )
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    return loss_head(
        flag,
        tokens=args.micro_batch_size * args.seq_length // cp,
        local_tokens=layer_tokens(args) // (cp * (tp if args.sequence_parallel else 1)),
        vocabulary=args.padded_vocab_size // tp,
        itemsize=args.params_dtype.itemsize,
        device_bytes=device_bytes,
    )


def device_memory(args: Any) -> int:
    """Memory that the model may have on this rank: `--memo-device-budget`, or the device's."""
    budget = device_budget_from_args(args)
    if budget is not None:
        return budget
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def loss_head(
    flag: str | None,
    *,
    tokens: int,
    local_tokens: int,
    vocabulary: int,
    itemsize: int,
    device_bytes: int | None,
) -> LossHead | None:
    """The head that `--memo-loss-chunks` asks for; None means stock's.

    Args:
        flag: "auto" or a number; None (no flag) is "auto".
        tokens: of a micro-batch, all its sequences, on the ranks that share a context.
        local_tokens: of one sequence on this rank: s / cp, over tp under sequence parallelism. A
            micro-batch of packed sequences is one.
        vocabulary: a rank's share, padded.
        itemsize: bytes of a logit as the output projection gives it.
        device_bytes: memory of the device, for "auto"; None where nobody knows, then it is stock's.

    Raises:
        ValueError: neither "auto" nor a whole number from 1 to `local_tokens`.
    """
    if flag is None or flag == AUTO:
        if device_bytes is None:
            return None
        # Cross entropy works on an fp32 copy beside the logits.
        logits = tokens * vocabulary * (itemsize + _FP32_BYTES)
        if logits * _SMALL_ENOUGH <= device_bytes:
            return None
        return LossHead(min(-(-logits * _OF_A_CHUNK // device_bytes), local_tokens))
    try:
        chunks = int(flag)
    except ValueError:
        raise ValueError(
            f"--memo-loss-chunks {flag}: must be {AUTO} or a whole number, such as 16."
        ) from None
    if chunks < 1:
        raise ValueError(
            f"--memo-loss-chunks {chunks}: must be at least 1. Leave the flag out to let memo "
            "choose."
        )
    _check_fits(chunks, local_tokens)
    return LossHead(chunks)


def _check_fits(chunks: int, local_tokens: int) -> None:
    if chunks > local_tokens:
        raise ValueError(
            f"--memo-loss-chunks {chunks}: more than the {local_tokens} tokens that a rank's head "
            f"works on. Give at most {local_tokens}."
        )
