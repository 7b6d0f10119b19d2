"""The mixture of experts of a layer: upstream's own, once over all of a rank's tokens.

    before   per chunk: output projection, residual, pre-MLP norm (the begin of a dense post)
    experts  once: router, dispatch, experts, combine, shared experts, residual

NOTE: why the experts see whole sequences. How many tokens an expert gets, its capacity and the
auxiliary losses are those of all tokens that the router sees at once; in token chunks they would be
others, and the loss another than stock's. The router runs once, in forward, and what it decided is
saved: a recompute that differed by one rounding would send tokens elsewhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_memo import compat
from megatron_memo.config import Experts
from megatron_memo.layer.chunks import Fate
from megatron_memo.layer.segment import Base, Segment
from megatron_memo.layer.stand_in import standing_in
from megatron_memo.swap.context import LayerContext

# (function, fate, bases) -> a Segment of the layer.
MakeSegment = Callable[[Callable[..., tuple[Tensor, ...]], Fate, list[Base]], Segment]


def before_experts(layer: TransformerLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What the mixture takes: `hidden` [rows, b, h], after attention, and its norm (same shape)."""
    normed = layer._forward_pre_mlp_layernorm(hidden)
    compat.forget_norm_input(layer)
    return hidden, normed


def run_experts(
    layer: TransformerLayer,
    policy: Experts,
    make_segment: MakeSegment,
    context: LayerContext | None,
    hidden: Tensor,
    normed: Tensor,
) -> Tensor:
    """Upstream's layer forward after `before_experts`, over all of this rank's tokens.

    Args:
        layer: its MLP is a MoELayer.
        policy: what happens to what the mixture saves.
        make_segment: sets what is the same for all segments of this layer's forward.
        context: where swapped tensors go; None keeps everything on the device.
        hidden: [n, b, h].
        normed: [n, b, h].

    Returns:
        The layer's output, [n, b, h].
    """
    if context is None or policy is Experts.KEEP:
        return make_segment(partial(_mixture, layer), Fate.KEEP, []).run(hidden, normed)[0]
    whole = make_segment(partial(_mixture, layer), Fate.SWAP, [])
    if policy is Experts.SWAP:
        return whole.run(hidden, normed)[0]
    with _recomputed_experts(layer, make_segment, context):
        return whole.run(hidden, normed)[0]


def _mixture(layer: TransformerLayer, hidden: Tensor, normed: Tensor) -> tuple[Tensor]:
    with standing_in(layer, pre_mlp_layernorm=lambda _: normed):
        return (layer._forward_mlp(hidden),)


@contextmanager
def _recomputed_experts(
    layer: TransformerLayer, make_segment: MakeSegment, context: LayerContext
) -> Iterator[None]:
    """While the body runs, experts save their inputs only and compute the rest again in backward.

    Their inputs are the tokens that the router has sent them and the probabilities that it gave;
    these go to host memory.
    """
    mixture: Any = layer.mlp
    experts, shared = mixture.experts, mixture.shared_experts

    def rerun(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        bases = [Base(t.detach(), partial(context.get, context.put(t))) for t in inputs]
        return make_segment(function, Fate.RECOMPUTE, bases).run(*inputs)[0]

    def run_routed(tokens: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        def function(tokens: Tensor, probs: Tensor) -> tuple[Tensor]:
            output, bias = experts(tokens, tokens_per_expert, probs)
            assert bias is None, "upstream's experts add their bias themselves"
            return (output,)

        return rerun(function, tokens, probs), None

    def run_shared(hidden: Tensor) -> Tensor:
        return rerun(lambda t: (shared(t),), hidden)

    calls: dict[str, Callable[..., Any]] = {"experts": run_routed}
    if shared is not None:
        calls["shared_experts"] = run_shared
    with standing_in(mixture, **calls):
        yield
