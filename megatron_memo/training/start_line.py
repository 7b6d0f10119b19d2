"""The one line that a run with memo starts on: what it does, on which limits, over which link."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_memo import platform
from megatron_memo.arguments import ratio_is_auto
from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import describe, layer_tokens, plan_chunks
from megatron_memo.layer.depth import LAYERS, Steps, prefetch_steps
from megatron_memo.layer.footprint import moved_bytes
from megatron_memo.layer.shape import LayerShape, layers_with_experts
from megatron_memo.plan.ratio import Link
from megatron_memo.sizes import size_words
from megatron_memo.training.loss_head import device_memory, head_of


def what_memo_does(args: Namespace, memo: MemoConfig) -> list[str]:
    """Parts of the line that are known from the flags alone.

    Args:
        args: Megatron's, validated.
        memo: the run's settings.
    """
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    layers = args.num_layers + (args.mtp_num_layers or 0)
    until = "until the best swap ratio is known, " if ratio_is_auto(args) else ""
    parts = [
        until + describe(memo, layer_tokens(args), ranks, layers, args.context_parallel_size),
    ]
    if args.num_experts:
        parts.append(f"experts: {memo.moe_experts.value}")
    if memo.resident_layers < layers:
        parts.append(_in_flight(args, memo, ranks))
    head = head_of(args, device_memory(args))
    if head is not None:
        parts.append(head.describe())
    return parts


def _in_flight(args: Namespace, memo: MemoConfig, ranks: int) -> str:
    """What the device holds of moved activations, on their way out or back."""
    tokens = layer_tokens(args) // (args.context_parallel_size or 1)
    chunks = len(plan_chunks(memo, tokens // ranks, ranks, keep=False))
    steps = Steps(chunks, experts=bool(args.num_experts))
    depth = prefetch_steps(memo, steps, tokens)
    layers = LAYERS if depth is None else depth / steps.count
    told = f"{LAYERS} layers" if depth is None else f"{depth} of a layer's {steps.count} steps"
    if ratio_is_auto(args):
        return f"{told} in flight"
    on_cuda = not platform.is_active()
    most = max(
        moved_bytes(LayerShape.from_args(args, on_cuda=on_cuda, experts=experts), memo)
        for experts in set(layers_with_experts(args))
    )
    return f"{told} in flight, about {size_words(round(layers * most))}"


class StartLine:
    """Says it before the first step, when the link can be measured; `begin` goes to
    `compat.wrap_train_step`.

    Args:
        parts: what is known before.
        probe: measures the link while all ranks copy. Collective. None where the swap ratio's own
            measurement follows, or nothing is copied.
        gather: collective; what each rank says, in rank order.
        release: gives the device back what loading a checkpoint and the probe have left in caches.
        log: says a line, from one rank.
    """

    def __init__(
        self,
        parts: Sequence[str],
        probe: Callable[[], Link] | None,
        gather: Callable[[Any], list[Any]],
        release: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._parts = list(parts)
        self._probe = probe
        self._gather = gather
        self._release = release
        self._log = log

    def begin(self, _chunks: Sequence[Any]) -> None:
        """Before the first step. Collective."""
        link = [] if self._probe is None else [_slowest(self._gather(self._probe()))]
        self._release()
        self._log("; ".join([*self._parts, *link]))


def _slowest(links: Sequence[Link]) -> str:
    """Of the rank whose link is slowest."""
    link = min(links, key=lambda each: each.d2h + each.h2d)
    return (
        f"link: {size_words(link.d2h)}/s to the host, {size_words(link.h2d)}/s back with all ranks "
        "of a node copying"
    )


def start_line(
    args: Namespace, memo: MemoConfig, room: str | None, log: Callable[[str], None]
) -> StartLine:
    """Of a run.

    Args:
        args: Megatron's, validated.
        memo: the run's settings.
        room: what the host has for moved activations; None where nobody asked.
        log: says a line, from one rank.
    """
    from megatron_memo.training import telling
    from megatron_memo.training.link_probe import AT_A_GLANCE, GLANCE_BYTES, link_of_run

    most = GLANCE_BYTES
    if memo.link_bandwidth is not None:  # a slowed link: no copy that takes much longer than asked
        most = min(most, max(int(memo.link_bandwidth * AT_A_GLANCE), 1))
    probe = None if ratio_is_auto(args) else partial(link_of_run, AT_A_GLANCE, most)
    parts = [*what_memo_does(args, memo), *([] if room is None else [room])]
    return StartLine(parts, probe, telling.gather, _release, log)


def _release() -> None:
    """The first step then starts with all the room that there is, resumed or not."""
    gc.collect()
    if not platform.is_active():
        torch.cuda.empty_cache()
