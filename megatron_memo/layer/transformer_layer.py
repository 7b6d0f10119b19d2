"""Megatron's TransformerLayer, in token chunks that are swapped, recomputed or kept.

The layer is three steps (MEMO, section 4.1, at the granularity of token chunks instead of layers):

    pre   per chunk: input norm, QKV projection, RoPE
    core attention over the whole sequence, once
    post  per chunk: output projection, residual, norm, MLP, residual

Where the MLP is a mixture of experts, post ends before it, and it runs over all tokens (see `moe`).
Each step is upstream's own code (see `stand_in`). All chunks form one plain autograd graph.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_memo import compat_versions, phases
from megatron_memo.config import MemoConfig
from megatron_memo.layer.attention import AttentionStep, QkvStore
from megatron_memo.layer.chunks import Chunk, Fate, plan_chunks
from megatron_memo.layer.depth import Steps, prefetch_steps
from megatron_memo.layer.latent import latent_rope, latent_rope_rows
from megatron_memo.layer.moe import before_experts, run_experts
from megatron_memo.layer.parameter_sum import ParameterSums
from megatron_memo.layer.rope import rope_rows
from megatron_memo.layer.rows import Rows, Source, Target, on_backward
from megatron_memo.layer.segment import Base, Segment
from megatron_memo.layer.stand_in import standing_in
from megatron_memo.ops.packed import bounds_of, is_packed
from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.swap.engine import get_engine
from megatron_memo.swap.group import Reads
from megatron_memo.swap.layer_pass import LayerPass

Fetch = Callable[[], Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]

# Arguments of upstream's forward that a token chunk has no share of yet. The launcher refuses the
# flags that lead to them; this is for whoever builds the layer without it.
_REFUSED_INPUTS = {
    "rotary_pos_cos": "cosines and sines instead of a RoPE table",
    "rotary_pos_sin": "cosines and sines instead of a RoPE table",
    "rotary_pos_cos_sin": "cosines and sines instead of a RoPE table",
    "context": "cross attention",
    "attention_bias": "an attention bias",
    "padding_mask": "a padding mask",
    "sequence_len_offset": "a sequence offset",
}
_INFERENCE_INPUTS = ("inference_context", "inference_params")


class MemoTransformerLayer(TransformerLayer):
    """Drop-in for `megatron.core.transformer.transformer_layer.TransformerLayer`.

    Built through ModuleSpec over any dense self-attention layer spec; same submodules, same state
    dict. In training it saves what `memo` says; without gradients it runs in the same chunks and
    saves nothing.

    Args:
        memo: ratio, chunks, resident layers.
        Others: upstream's.
    """

    def __init__(self, *args: Any, memo: MemoConfig, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.memo = memo
        given = inspect.signature(TransformerLayer).bind(*args, **kwargs).arguments
        # `layer_number` counts over all stages; what was given counts over this model chunk.
        # Layers of multi-token prediction count for themselves and come after all others.
        self.further = compat_versions.is_mtp_layer(self)
        follows = self.further and get_num_layers_to_build(self.config, given.get("vp_stage")) > 0
        self.first_of_chunk = given.get("layer_number", 1) == 1 and not follows
        # Attention runs once and keeps no scores, whatever --recompute-modules core_attn asks for.
        self.self_attention.checkpoint_core_attention = False
        staged = self.config.virtual_pipeline_model_parallel_size is not None
        self.stage: int | None = given.get("vp_stage") if staged else None
        # Of the last forward: rows of this rank's input, and ranks that share the sequence.
        self.rows_seen: tuple[int, int] | None = None

    @property
    def position(self) -> int:
        """The layer's number among all of the model's, from 1, as forward meets them."""
        return self.layer_number + (self.config.num_layers if self.further else 0)

    @property
    def resident(self) -> bool:
        """One of the model's last layers, whose backward follows their forward at once.

        Only the last pipeline stage has any: on the others, a micro-batch's backward begins when
        the later stages are through with it.
        """
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        return self.position > layers - self.memo.resident_layers

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[n, b, h] -> ([n, b, h], context), n this rank's tokens; arguments are upstream's."""
        if args:
            names = inspect.signature(TransformerLayer._forward_attention)
            kwargs = names.bind(self, hidden_states, *args, **kwargs).arguments
            del kwargs["self"], kwargs["hidden_states"]
        if any(kwargs.get(name) is not None for name in _INFERENCE_INPUTS):
            return super().forward(hidden_states, **kwargs)
        for name, meaning in _REFUSED_INPUTS.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"memo does not support {meaning} (argument {name}) yet")
        output = _ChunkedForward(self, hidden_states, kwargs).run()
        # Schedules free an output's data behind autograd's back and want no view.
        output = make_viewless_tensor(
            inp=output, requires_grad=output.requires_grad, keep_graph=True
        )
        return output, kwargs.get("context")


class _ChunkedForward:
    """One forward of one layer on one micro-batch."""

    def __init__(self, layer: MemoTransformerLayer, x: Tensor, inputs: dict[str, Any]):
        config = layer.config
        self.layer = layer
        saves = _has_backward(layer, x)
        # A frozen embedding's output: backward must still come by to release what was saved.
        self.x = x.detach().requires_grad_() if saves and not x.requires_grad else x
        self.inputs = inputs
        # Under sequence parallelism a rank holds n of s tokens and attention sees all ranks'.
        self.ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.n = x.size(0)
        layer.rows_seen = self.n, self.ranks
        self.packed = inputs.get("packed_seq_params")
        if is_packed(self.packed):
            _check_packed(self.packed, config, self.n * self.ranks)
        keeps = layer.resident or not saves
        self.chunks = plan_chunks(layer.memo, self.n, self.ranks, keep=keeps)
        self.steps = Steps(len(self.chunks), experts=layer.is_moe_layer)
        self.passing: LayerPass | None = None
        if torch.is_grad_enabled():
            passing = get_engine(layer.memo).begin_layer(
                first=layer.first_of_chunk,
                swaps=not keeps,
                device=x.device,
                depth=prefetch_steps(layer.memo, self.steps, self.n * self.ranks),
            )
            self.passing = passing if saves else None
        self.context = self.passing.own if self.passing is not None else None
        self.micro_batch = phases.current_micro_batch(layer.stage)
        self.sums = ParameterSums(
            layer,
            chunks=len(self.chunks),
            fusion=config.gradient_accumulation_fusion,
            used_once=layer.mlp if layer.is_moe_layer else None,
        )
        # Parameters outlive the step; a chunk's RoPE rows are held by its segment. Nothing else may
        # be known by address alone (see the NOTEs in `segment`).
        self.fixed = _addresses(list(layer.parameters()))

    def run(self) -> Tensor:
        x, passing = self.x, self.passing
        if passing is not None:  # passes without gradients are no part of an iteration's plan
            self.enter(FORWARD)
        source = Source(x, on_complete=passing.end_backward if passing else None)
        anchor = source.anchor(x)
        values = x.detach()
        fetch_x = self.stored_input(values)
        # A chunk's rows are taken once, for both of its segments (see rows.Source), and just before
        # the first: autograd runs later nodes first, so each chunk's gradient is written as soon
        # as the chunk is done.
        taken: list[Tensor] = []

        def take(chunk: Chunk) -> Tensor:
            rows = source.take(anchor, self.local(chunk), values[chunk.start : chunk.stop])
            taken.append(rows)
            return rows

        qkv, store = self.pre(take, fetch_x)
        out, fetch_out = self.attend(qkv, store)
        del qkv
        parts = self.post(taken, fetch_x, out, fetch_out)
        y = self.experts(*parts) if self.layer.is_moe_layer else parts[0]
        if passing is None:
            return y
        first = self.steps.count - 1
        return on_backward(y, partial(_begin_backward, passing, first, self.phase(BACKWARD)))

    # ---- the three steps

    def pre(self, take: Callable[[Chunk], Tensor], fetch_x: Fetch) -> tuple[Qkv, QkvStore | None]:
        """q, k, v over the whole sequence, chunk by chunk, and how backward gets them again."""
        layer = self.layer
        targets: tuple[Target, ...] = (Target(), Target(), Target())
        tokens: tuple[list[Tensor], ...] = ([], [], [])
        store = QkvStore(self.context, self.steps.attention) if self.context is not None else None
        for index, chunk in enumerate(self.chunks):
            self.enter(FORWARD, index)
            rows, everywhere = take(chunk), self.everywhere(chunk)
            rope = self.rope_rows(everywhere)
            segment = self.segment(
                chunk,
                partial(_qkv, layer, rope),
                [Base(rows.detach(), partial(_rows_of, fetch_x, self.local(chunk)))],
                also_fixed=rope,
                keep_outputs=True,
            )
            with self.sums.of_one_chunk():
                parts = segment.run(rows)
            if store is not None:
                store.add(chunk, everywhere, segment, parts)
            self.end_step()
            begins = self.begins(self.steps.pre(index), index)
            for target, token_list, part in zip(targets, tokens, parts, strict=True):
                token_list.append(target.put(everywhere, part, begins))
            del parts, part
        joined = [
            target.join(token_list) for target, token_list in zip(targets, tokens, strict=True)
        ]
        return (joined[0], joined[1], joined[2]), store

    def attend(self, qkv: Qkv, store: QkvStore | None) -> tuple[Tensor, Fetch]:
        """Core attention's output over the whole sequence, and how backward gets it again."""
        self.enter(FORWARD)
        attention = self.layer.self_attention
        mask, packed = self.inputs.get("attention_mask"), self.packed

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if is_packed(packed):  # as upstream hands them over: without a batch
                q, k, v = (t.squeeze(1) for t in (q, k, v))
            out = attention.core_attention(
                q, k, v, mask, attn_mask_type=attention.attn_mask_type, packed_seq_params=packed
            )
            if is_packed(packed):
                out = out.reshape(out.size(0), 1, -1)
            return out.contiguous()

        if store is None or self.context is None:
            out, fetch_out = core(*qkv), _nothing
        else:
            reads = Reads(self.steps.last_chunk, self.steps.attention)
            step = AttentionStep(self.context, store, reads, self.layer.memo.min_swap_bytes)
            out, fetch_out = step.run(core, qkv), step.fetch_output
        self.end_step()
        return out, fetch_out

    def post(
        self, taken: list[Tensor], fetch_x: Fetch, out: Tensor, fetch_out: Fetch
    ) -> tuple[Tensor, ...]:
        """The layer's output over this rank's tokens, chunk by chunk; of a layer with experts what
        these take (see `moe.before_experts`)."""
        layer, values = self.layer, out.detach()
        source = Source(out, self.begins(self.steps.attention))
        count = 2 if layer.is_moe_layer else 1
        targets = tuple(Target() for _ in range(count))
        tokens: tuple[list[Tensor], ...] = tuple([] for _ in range(count))
        anchor = source.anchor(out)
        has_fc2 = "linear_fc2" in layer.mlp._modules
        for index, (chunk, rows) in enumerate(zip(self.chunks, taken, strict=True)):
            self.enter(FORWARD, index)
            everywhere = self.everywhere(chunk)
            out_rows = everywhere.take(values)
            segment = self.segment(
                chunk,
                partial(_after_attention, layer),
                [
                    Base(rows.detach(), partial(_rows_of, fetch_x, self.local(chunk))),
                    Base(out_rows, partial(_rows_of, fetch_out, everywhere)),
                ],
                last_gemm=(layer.mlp, "linear_fc2") if has_fc2 else None,
            )
            with self.sums.of_one_chunk():
                parts = segment.run(rows, source.take(anchor, everywhere, out_rows))
            self.end_step()
            begins = self.begins(self.steps.post(index), index)
            for target, token_list, part in zip(targets, tokens, parts, strict=True):
                token_list.append(target.put(self.local(chunk), part, begins))
            del parts, part, out_rows
        return tuple(
            target.join(token_list) for target, token_list in zip(targets, tokens, strict=True)
        )

    def experts(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """The layer's output over this rank's tokens, from what `post` made for its experts."""
        self.enter(FORWARD)
        layer = self.layer

        def make_segment(function: Any, fate: Fate, bases: list[Base]) -> Segment:
            return self.segment(Chunk(0, self.n, fate), function, bases)

        with self.sums.of_one_chunk():
            y = run_experts(
                layer, layer.memo.moe_experts, make_segment, self.context, hidden, normed
            )
        self.end_step()
        return y

    # ---- markers

    def phase(self, direction: str, chunk: int | None = None) -> Phase:
        layer = self.layer
        return Phase(LAYER, direction, self.micro_batch, layer.position, chunk, layer.stage)

    def enter(self, direction: str, chunk: int | None = None) -> None:
        """The whole layer, or one of its chunks, is at work from here on."""
        if self.passing is not None:
            phases.enter(self.phase(direction, chunk))

    def begins(self, step: int, chunk: int | None = None) -> Callable[[], None]:
        """Says in backward that it begins a step. It holds no reference to this forward."""
        return partial(_begin_step, self.passing, step, self.phase(BACKWARD, chunk))

    # ---- helpers

    def segment(
        self,
        chunk: Chunk,
        function: Callable[..., tuple[Tensor, ...]],
        bases: list[Base],
        *,
        also_fixed: Any = None,
        **options: Any,
    ) -> Segment:
        return Segment(
            function,
            bases=bases,
            fate=chunk.fate,
            context=self.context,
            fixed=self.fixed | _addresses(also_fixed),
            min_swap_bytes=self.layer.memo.min_swap_bytes,
            **options,
        )

    def stored_input(self, x: Tensor) -> Fetch:
        """Sends the layer input where backward finds it; how to find it."""
        context, steps = self.context, self.steps
        if context is None:
            return _nothing
        handle = context.put(x)
        # Recomputed chunks come last, so backward begins with one if there is any, and that reads
        # the input; swapped ones read it in their first half only.
        recomputes = self.chunks[-1].fate is Fate.RECOMPUTE
        context.flush(Reads(steps.last_chunk if recomputes else steps.attention - 1, 0))
        return lambda: context.get(handle)

    def end_step(self) -> None:
        if self.passing is not None:
            self.passing.end_step()

    def local(self, chunk: Chunk) -> Rows:
        """The chunk in a tensor over this rank's tokens."""
        return Rows(1, self.n, chunk.start, chunk.stop)

    def everywhere(self, chunk: Chunk) -> Rows:
        """The chunk in a tensor over the whole sequence."""
        return Rows(self.ranks, self.n, chunk.start, chunk.stop)

    def rope_rows(self, rows: Rows) -> Any:
        """The rows of the table of rotations that a chunk's tokens are turned by."""
        attention, rope = self.layer.self_attention, self.inputs.get("rotary_pos_emb")
        if isinstance(attention, MultiLatentAttention):
            assert rope is None, "multi-latent attention rotates by itself"
            return latent_rope_rows(attention, rows)
        return rope_rows(rope, rows, self.packed)


def _check_packed(packed: Any, config: TransformerConfig, tokens: int) -> None:
    """Refuses packed sequences that no chunk of one rank's tokens has its share of."""
    if config.context_parallel_size > 1:
        raise ValueError(
            "memo does not support packed sequences that context-parallel ranks share. Use "
            "--context-parallel-size 1."
        )
    bounds_of(packed, tokens)


def _begin_backward(passing: LayerPass, step: int, phase: Phase) -> None:
    phases.enter(phase)
    passing.begin_backward()
    passing.begin_backward_step(step)


def _begin_step(passing: LayerPass | None, step: int, phase: Phase) -> None:
    phases.enter(phase)
    if passing is not None:
        passing.begin_backward_step(step)


def _nothing() -> Tensor:
    raise AssertionError("a layer that keeps its activations fetches nothing")


def _has_backward(layer: MemoTransformerLayer, x: Tensor) -> bool:
    """Whether backward will come by: not where all is frozen from the model's input up to here."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())


def _addresses(value: Any) -> frozenset[int]:
    """Storage addresses of the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return frozenset((value.untyped_storage().data_ptr(),))
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_addresses(item) for item in value))
    return frozenset()


def _rows_of(fetch: Fetch, rows: Rows) -> Tensor:
    return rows.take(fetch())


def _qkv(layer: MemoTransformerLayer, rope: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Upstream's attention forward up to the core attention: q, k and v with RoPE applied."""
    attention = layer.self_attention
    caught: list[Tensor] = []

    def catch(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        caught.extend((query, key, value))
        return query.detach()  # goes to the projection's stand-in and no further

    def pass_on(t: Tensor) -> tuple[Tensor, None]:
        return t, None

    latent = isinstance(attention, MultiLatentAttention)
    with (
        standing_in(attention, core_attention=catch, linear_proj=pass_on),
        latent_rope(attention, rope) if latent else nullcontext(),
    ):
        attention(
            layer.input_layernorm(x), attention_mask=None, rotary_pos_emb=None if latent else rope
        )
    return tuple(caught)


def _after_attention(
    layer: MemoTransformerLayer, x: Tensor, attention_output: Tensor
) -> tuple[Tensor, ...]:
    """Upstream's layer forward after the core attention, for rows x of the layer input; of a layer
    with experts up to these."""
    projection = layer.self_attention.linear_proj

    def project(*_args: Any, **_kwargs: Any) -> Any:
        return projection(attention_output)

    with standing_in(layer, input_layernorm=lambda t: t, self_attention=project):
        hidden, _ = layer._forward_attention(x)
    if layer.is_moe_layer:
        return before_experts(layer, hidden)
    return (layer._forward_mlp(hidden),)
