"""Bytes that one layer moves to host memory for one micro-batch, from the model's shape alone.

What a layer saves for backward is a short list of tensors, each so many bytes a token. The layer's
input and its attention output (with its log-sum-exp) always go to host memory; of the others, the
rows of the swapped tokens go. tests/layer/test_footprint.py holds the list to what the engine
moved, byte by byte, for the plain torch kernels of a machine without CUDA.

NOTE: what depends on the kernels
---------------------------------
* torch's RMSNorm has one kernel on CUDA, which saves its input and a factor a row. On CPU it is
  several operators, which also save the normalised input, in fp32.
* A dropout mask is a byte an element on CUDA, and of the activations' type on CPU.
* A projection that takes its norm with it (Transformer Engine) saves the same tensors.
The CUDA numbers follow from PyTorch's and Megatron's code and have not been seen on hardware.

A layer of mixture of experts, latent attention, or upstream's own unfused core attention saves
other tensors, which this list does not have.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import Fate, layer_tokens, packs, plan_chunks
from megatron_memo.swap.context import ALIGNMENT

_STATISTICS = 4  # bytes of a norm's mean or factor, and of a log-sum-exp: fp32


def not_foreseen(args: argparse.Namespace) -> str | None:
    """The flag that gives the model layers which save what this list does not have, if any."""
    if getattr(args, "num_experts", None):
        return f"--num-experts {args.num_experts}"
    if getattr(args, "multi_latent_attention", False):
        return "--multi-latent-attention"
    return None


@dataclass(frozen=True)
class LayerShape:
    """What decides the size of a layer's saved tensors on one rank.

    Attributes:
        tokens: of one sequence that the rank's attention sees (its context-parallel share).
        shared_by: ranks that share these tokens outside of attention: tp under sequence
            parallelism, else 1.
        batch: sequences of a micro-batch; 1 where they are packed in one row of tokens.
        hidden: h.
        ffn: this rank's columns of the MLP: f/tp.
        heads: this rank's query heads.
        groups: this rank's key and value heads.
        head_dim: d.
        itemsize: bytes of an activation.
        rms_norm: RMSNorm, else LayerNorm.
        qk_norm: queries and keys are normalised.
        rotary_dim: dimensions of a head that RoPE turns, where cosines and sines are saved (not
            fused); 0 otherwise.
        gated: the MLP's activation is gated (SwiGLU): fc1 has 2f columns.
        fused_activation: bias, activation and gate are one function that saves its input only.
        dropout: hidden dropout is above 0.
        on_cuda: CUDA's kernels (see NOTE).
    """

    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    itemsize: int
    shared_by: int = 1
    batch: int = 1
    rms_norm: bool = False
    qk_norm: bool = False
    rotary_dim: int = 0
    gated: bool = False
    fused_activation: bool = False
    dropout: bool = False
    on_cuda: bool = True

    @property
    def local_tokens(self) -> int:
        """Rows of the layer's input on this rank."""
        return self.tokens // self.shared_by

    @classmethod
    def from_args(cls, args: argparse.Namespace, *, on_cuda: bool) -> LayerShape:
        """The shape that Megatron's validated arguments describe.

        Args:
            args: validated.
            on_cuda: whose kernels will run.
        """
        tp = args.tensor_model_parallel_size
        heads = args.num_attention_heads
        grouped = getattr(args, "group_query_attention", False)
        groups = args.num_query_groups if grouped else heads
        rope = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
        saves_rope = rope and not getattr(args, "apply_rope_fusion", False)
        swiglu = bool(getattr(args, "swiglu", False))
        return cls(
            tokens=layer_tokens(args) // (getattr(args, "context_parallel_size", None) or 1),
            shared_by=tp if args.sequence_parallel else 1,
            batch=1 if packs(args) else args.micro_batch_size,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size // tp,
            heads=heads // tp,
            groups=max(groups // tp, 1),
            head_dim=args.kv_channels,
            itemsize=args.params_dtype.itemsize,
            rms_norm=args.normalization == "RMSNorm",
            qk_norm=bool(getattr(args, "qk_layernorm", False)),
            rotary_dim=int(args.kv_channels * args.rotary_percent) if saves_rope else 0,
            gated=swiglu or bool(getattr(args, "quick_geglu", False)),
            fused_activation=bool(args.bias_swiglu_fusion if swiglu else args.bias_gelu_fusion),
            dropout=args.hidden_dropout > 0,
            on_cuda=on_cuda,
        )


@dataclass(frozen=True)
class Saved:
    """A tensor that is saved for backward.

    Attributes:
        row_bytes: of one token.
        everywhere: it holds every token that attention sees, else this rank's own.
        always: it leaves whatever alpha is.
        whatever_size: `min_swap_bytes` does not keep it on the device.
    """

    row_bytes: int
    everywhere: bool = False
    always: bool = False
    whatever_size: bool = False


@dataclass(frozen=True)
class Footprint:
    """Bytes of one layer and one micro-batch.

    Attributes:
        always: layer input, attention output and log-sum-exp.
        others: everything else that is saved, for all tokens; the fraction alpha of it moves.
    """

    always: int
    others: int

    def moved(self, swap_ratio: float) -> int:
        """Bytes that go to host memory at this ratio, rounding of rows aside."""
        return self.always + round(swap_ratio * self.others)


def footprint(shape: LayerShape) -> Footprint:
    """What the layer moves, if no tensor is too small to be worth moving."""
    sizes = {True: 0, False: 0}
    for saved in saved_tensors(shape):
        sizes[saved.always] += saved.row_bytes * _rows(shape, saved, shape.local_tokens)
    return Footprint(always=sizes[True], others=sizes[False])


def moved_bytes(shape: LayerShape, memo: MemoConfig) -> int:
    """Bytes that a swapping layer's copies move, exactly.

    Args:
        shape: the layer's.
        memo: ratio, chunks, and the size below which a tensor stays.

    Raises:
        ValueError: more chunks than tokens.
    """
    return sum(_storages(shape, memo))


def host_bytes(shape: LayerShape, memo: MemoConfig) -> int:
    """Bytes of host memory that hold them: `moved_bytes`, each tensor aligned.

    Raises:
        ValueError: more chunks than tokens.
    """
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in _storages(shape, memo))


def _storages(shape: LayerShape, memo: MemoConfig) -> Iterator[int]:
    chunks = plan_chunks(memo, shape.local_tokens, shape.shared_by, keep=False)
    swapped = [c.stop - c.start for c in chunks if c.fate is Fate.SWAP]
    for saved in saved_tensors(shape):
        for count in [shape.local_tokens] if saved.always else swapped:
            nbytes = saved.row_bytes * _rows(shape, saved, count)
            if saved.whatever_size or nbytes >= memo.min_swap_bytes:
                yield nbytes


def _rows(shape: LayerShape, saved: Saved, local_rows: int) -> int:
    return local_rows * (shape.shared_by if saved.everywhere else 1)


def saved_tensors(shape: LayerShape) -> Iterator[Saved]:
    """Every tensor that is moved for the swapped tokens, views of one storage counted once."""
    itemsize, batch = shape.itemsize, shape.batch
    hidden = batch * shape.hidden * itemsize
    heads, groups = (batch * n * shape.head_dim * itemsize for n in (shape.heads, shape.groups))
    # The layer's input and what attention itself saves.
    yield Saved(hidden, always=True, whatever_size=True)
    yield Saved(heads, everywhere=True, always=True, whatever_size=True)
    yield Saved(batch * shape.heads * _STATISTICS, everywhere=True, always=True)
    for part in (heads, groups, groups):  # q, k and v, as attention reads them
        yield Saved(part, everywhere=True, whatever_size=True)
    # Before attention.
    yield from _norm(shape, shape.hidden, 1, inputs=[])
    yield Saved(hidden)  # the projection's input
    if shape.qk_norm:
        yield from _qk_norms(shape)
    for _ in range(4 if shape.rotary_dim else 0):  # cosines and sines, of q's turn and of k's
        yield Saved(shape.rotary_dim * itemsize, everywhere=True)
    # After attention.
    yield from _norm(shape, shape.hidden, 1, inputs=[hidden])
    yield Saved(hidden)  # fc1's input
    for _ in range(2 if shape.dropout else 0):
        yield Saved(batch * shape.hidden * (1 if shape.on_cuda else itemsize))
    ffn = batch * shape.ffn * itemsize
    yield Saved((2 if shape.gated else 1) * ffn, everywhere=True)  # the activation's input
    if shape.gated and not shape.fused_activation:
        yield from (Saved(ffn, everywhere=True),) * 2  # both factors of the gate
    yield Saved(ffn, everywhere=True)  # fc2's input


def _norm(
    shape: LayerShape, width: int, rows: int, *, inputs: list[int], everywhere: bool = False
) -> Iterator[Saved]:
    """What a norm saves besides its output.

    Args:
        shape: the layer's.
        width: elements that are normalised together.
        rows: of these, for each token of each sequence.
        inputs: bytes a token that move each time that its input is saved, twice by the norm of
            several operators; [] if the input is there anyway.
        everywhere: it works on every token that attention sees.
    """
    in_fp32 = Saved(shape.batch * rows * width * 4, everywhere)
    statistic = Saved(shape.batch * rows * _STATISTICS, everywhere)
    if not shape.rms_norm or shape.on_cuda:
        yield from (Saved(nbytes, everywhere) for nbytes in inputs[:1])
        yield from (statistic,) * (1 if shape.rms_norm else 2)
        return
    if shape.itemsize < 4:  # it works on a copy in fp32
        yield in_fp32
    else:
        yield from (Saved(nbytes, everywhere) for nbytes in inputs)
    yield from (statistic, in_fp32)


def _qk_norms(shape: LayerShape) -> Iterator[Saved]:
    # Keys are a view of the projection's output, and so are queries where no copy is needed to
    # line them up. A view of less than half of a storage is copied out each time it is saved.
    head = shape.batch * shape.head_dim * shape.itemsize
    queries, keys = shape.heads * head, shape.groups * head
    if shape.heads == shape.groups:
        inputs = [queries] * 2
    elif shape.groups == 1:
        inputs = [queries + 2 * keys]
    else:
        inputs = [queries]
    yield from _norm(shape, shape.head_dim, shape.heads, inputs=inputs, everywhere=True)
    yield from _norm(shape, shape.head_dim, shape.groups, inputs=[keys] * 2, everywhere=True)
