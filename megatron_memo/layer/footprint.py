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

NOTE: mixtures of experts
-------------------------
What they move does not depend on the ratio but on `--memo-moe-experts`, and on how many tokens the
router sends to this rank's experts: they are taken to get as many as all others. A rank that gets
more moves more. Without expert parallelism the number is exact. What the router itself keeps is
counted from above, in whole by a few per cent of a mixture's bytes.

Upstream's own unfused core attention saves other tensors, which this list does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_memo.config import Experts, MemoConfig
from megatron_memo.layer.chunks import Fate, plan_chunks
from megatron_memo.layer.shape import ExpertShape, LatentShape, LayerShape
from megatron_memo.swap.context import ALIGNMENT

_STATISTICS = 4  # bytes of a norm's mean or factor, and of a log-sum-exp: fp32


@dataclass(frozen=True)
class Saved:
    """A tensor that is saved for backward.

    Attributes:
        row_bytes: of one token.
        everywhere: it holds every token that attention sees, else this rank's own.
        always: it leaves whatever alpha is.
        whatever_size: `min_swap_bytes` does not keep it on the device.
        pieces: tensors that it consists of, one an expert.
    """

    row_bytes: float
    everywhere: bool = False
    always: bool = False
    whatever_size: bool = False
    pieces: int = 1


@dataclass(frozen=True)
class Footprint:
    """Bytes of one layer and one micro-batch.

    Attributes:
        always: layer input, attention output and log-sum-exp; all that a mixture of experts saves.
        others: everything else that is saved, for all tokens; the fraction alpha of it moves.
    """

    always: int
    others: int

    def moved(self, swap_ratio: float) -> int:
        """Bytes that go to host memory at this ratio, rounding of rows aside."""
        return self.always + round(swap_ratio * self.others)


def footprint(shape: LayerShape, experts: Experts = Experts.SWAP) -> Footprint:
    """What the layer moves, if no tensor is too small to be worth moving.

    Args:
        shape: the layer's.
        experts: what happens to a mixture of experts.
    """
    sizes = {True: 0, False: 0}
    for saved in saved_tensors(shape, experts):
        sizes[saved.always] += _nbytes(shape, saved, shape.local_tokens)
    return Footprint(always=sizes[True], others=sizes[False])


def moved_bytes(shape: LayerShape, memo: MemoConfig) -> int:
    """Bytes that a swapping layer's copies move; exactly, but for experts (see NOTE).

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
    for saved in saved_tensors(shape, memo.moe_experts):
        for count in [shape.local_tokens] if saved.always else swapped:
            nbytes = _nbytes(shape, saved, count)
            if saved.whatever_size or nbytes >= memo.min_swap_bytes:
                yield from (math.ceil(nbytes / saved.pieces),) * saved.pieces


def _nbytes(shape: LayerShape, saved: Saved, local_rows: int) -> int:
    return math.ceil(saved.row_bytes * local_rows * (shape.shared_by if saved.everywhere else 1))


def saved_tensors(shape: LayerShape, experts: Experts = Experts.SWAP) -> Iterator[Saved]:
    """Every tensor that is moved for the swapped tokens, views of one storage counted once."""
    itemsize, batch = shape.itemsize, shape.batch
    hidden, each = batch * shape.hidden * itemsize, batch * itemsize
    # The layer's input and what attention itself saves.
    yield Saved(hidden, always=True, whatever_size=True)
    yield Saved(each * shape.output, everywhere=True, always=True, whatever_size=True)
    yield Saved(batch * shape.heads * _STATISTICS, everywhere=True, always=True)
    for part in (shape.query, shape.key, shape.value):  # as attention reads them
        yield Saved(each * part, everywhere=True, whatever_size=True)
    # Before attention.
    yield from _norm(shape, shape.hidden, 1, inputs=[])
    yield Saved(hidden)  # the projection's input
    if shape.latent is not None:
        yield from _latents(shape, shape.latent)
    elif shape.qk_norm:
        yield from _qk_norms(shape)
    for _ in range(4 if shape.rotary_dim else 0):  # cosines and sines, of q's turn and of k's
        yield Saved(shape.rotary_dim * itemsize, everywhere=True)
    # After attention.
    yield from _norm(shape, shape.hidden, 1, inputs=[hidden])
    mask = batch * shape.hidden * (1 if shape.on_cuda else itemsize)
    if shape.experts is not None:
        if shape.dropout:
            yield Saved(mask)
        yield from _mixture(shape, shape.experts, experts)
        return
    yield Saved(hidden)  # fc1's input
    for _ in range(2 if shape.dropout else 0):
        yield Saved(mask)
    ffn = each * shape.ffn
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


def _latents(shape: LayerShape, latent: LatentShape) -> Iterator[Saved]:
    """The down-projections' outputs, which ranks gather and share out again, and their norms."""
    each = shape.batch * shape.itemsize
    widths = []
    if latent.q_rank is not None:
        # Of a gathered tensor that at most two ranks share a rank's part is at least half.
        whole = shape.shared_by <= 2
        stored = each * latent.q_rank * (shape.shared_by if whole else 1)
        widths.append((latent.q_rank, stored, 1 if whole else 2))
    # Keys' positions lie in the same storage, but are left behind where ranks share the tokens.
    alone = shape.shared_by > 1 or latent.kv_rank < latent.rope_dim
    stored = each * (latent.kv_rank + (0 if alone else latent.rope_dim))
    widths.append((latent.kv_rank, stored, 1 if shape.shared_by > 1 or not alone else 2))
    for width, stored, copies in widths:
        if shape.qk_norm:
            yield from _norm(shape, width, 1, inputs=[stored] * copies)
            yield Saved(each * width)  # its output
        else:
            yield Saved(stored)


def _mixture(shape: LayerShape, experts: ExpertShape, policy: Experts) -> Iterator[Saved]:
    """What leaves of a mixture of experts, over all tokens at once."""
    if policy is Experts.KEEP:
        return
    batch, hidden = shape.batch, shape.hidden * shape.itemsize
    for row_bytes in _router(shape, experts):
        yield Saved(batch * row_bytes, always=True)
    for row_bytes in _experts(shape, experts, whole=policy is Experts.SWAP):
        yield Saved(
            batch * row_bytes,
            always=True,
            whatever_size=policy is Experts.RECOMPUTE,
            pieces=experts.local if policy is Experts.SWAP else 1,
        )
    if policy is Experts.SWAP and experts.shared_ffn:
        for row_bytes in _inside(shape, experts.shared_ffn, weighted=False):
            yield Saved(batch * row_bytes, everywhere=True, always=True)
        if experts.shared_gate:
            yield Saved(batch * (hidden + 2 * experts.router_itemsize), always=True)
    if shape.dropout:
        mask = batch * shape.hidden * (1 if shape.on_cuda else shape.itemsize)
        yield Saved(mask, always=True)


def _router(shape: LayerShape, experts: ExpertShape) -> Iterator[float]:
    """Bytes a token, tensor by tensor: its input, choices, scores, and where tokens go."""
    score, index = experts.router_itemsize, 8
    yield shape.hidden * shape.itemsize
    visits = experts.visits(shape.batch * shape.local_tokens)
    chosen = visits if experts.padded else experts.topk * experts.tp
    yield from (index * chosen,) * 2
    yield from (index * experts.topk, score * experts.topk)
    if 2 * experts.topk >= experts.count:
        yield index * experts.count  # of a sort over all of them a half is used
    kept = 2 * experts.whole_scores + experts.aux_loss + experts.z_loss
    yield from (score * experts.count,) * kept
    if experts.aux_loss:
        yield index * experts.topk
    if experts.z_loss:
        yield score


def _experts(shape: LayerShape, experts: ExpertShape, *, whole: bool) -> Iterator[float]:
    """Bytes a token of this rank's, tensor by tensor: tokens that experts get, with their scores;
    `whole`: and all that experts save."""
    visits = experts.visits(shape.batch * shape.local_tokens)
    hidden = shape.hidden * shape.itemsize
    yield visits * experts.router_itemsize
    # Of two experts, the one with more tokens keeps the storage of both.
    twice = whole and experts.local == 2 and not experts.padded
    yield visits * hidden * (1.5 if twice else 1)
    if whole:
        yield from (visits * each for each in _inside(shape, experts.ffn, weighted=True))


def _inside(shape: LayerShape, ffn: int, *, weighted: bool) -> Iterator[int]:
    """Of an expert between its projections; `weighted`: by the router's score."""
    inner = ffn * shape.itemsize
    yield (2 if shape.gated else 1) * inner  # the activation's input
    if not shape.fused_activation:
        yield from (inner,) * ((2 if shape.gated else 0) + weighted)
    yield inner  # fc2's input
