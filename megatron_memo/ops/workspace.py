"""Memory that CUDA kernels ask for inside of an operator, where no trace sees it.

Formulas by operator; sizes in bytes. They follow torch's sources, not a measurement: no GPU was at
hand. Each names the file it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOAT, INDEX = 4, 8  # bytes of a float32 and an int64


class Workspace(NamedTuple):
    """Memory that a kernel takes and gives back before the next operator.

    Attributes:
        what: whose it is, for people.
        size: bytes.
    """

    what: str
    size: int


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flash_backward(batch: int, heads: int, tokens: int, head_dim: int) -> list[Workspace]:
    """Row sums and the fp32 accumulator of dq; heads are query heads, keys have as many.

    Source: ``mha_bwd`` of aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp. Where
    the deterministic kernel is asked for, the accumulator is multiplied by the number of splits;
    that is not counted here, training refuses or warns of it.
    """
    rows = _up(tokens, 128)
    width = _up(head_dim, 32) if head_dim <= 192 else 256
    return [
        Workspace("flash backward's row sums", batch * heads * rows * FLOAT),
        Workspace("flash backward's fp32 dq", batch * heads * rows * width * FLOAT),
    ]


def embedding_backward(indices: int, vocabulary: int, width: int) -> list[Workspace]:
    """Sorting the indices, and fp32 partial sums of rows with equal ones.

    How many partial sums there are depends on the tokens; this is the most there can be. Source:
    ``embedding_dense_backward_cuda`` of aten/src/ATen/native/cuda/Embedding.cu and
    ``embedding_backward_cuda_kernel`` of EmbeddingBackwardKernel.cu (10 rows a partial sum).
    """
    if indices <= 3072:
        return []  # a kernel that does not sort
    segments = min(vocabulary, indices)
    partial = min(indices, indices // 10 + segments)
    return [
        Workspace("embedding backward's sorted indices", 2 * indices * INDEX),
        # Radix sort's second buffers for keys and values.
        Workspace("embedding backward's sort", 2 * indices * INDEX),
        Workspace("embedding backward's segments", (indices + 3 * segments) * INDEX),
        Workspace("embedding backward's partial sums", partial * width * FLOAT),
    ]


def cublas(compute_capability: int) -> int:
    """Bytes that torch hands to cuBLAS once for the stream, and keeps.

    Source: ``parseChosenWorkspaceSize`` of aten/src/ATen/cuda/CublasHandlePool.cpp; the variable
    CUBLAS_WORKSPACE_CONFIG changes it.
    """
    kib = 4096 * 8 if compute_capability >= 9 else 4096 * 2 + 16 * 8
    return kib * 1024


def _flash(args: tuple) -> list[Workspace]:
    query = args[1]  # [b, heads, s, d]
    return flash_backward(query.size(0), query.size(1), query.size(2), query.size(3))


def _embedding(args: tuple) -> list[Workspace]:
    grad, indices, vocabulary = args[:3]
    return embedding_backward(indices.numel(), vocabulary, grad.size(-1))


def _masked(args: tuple) -> list[Workspace]:
    """Positions of a boolean index's true entries: as many as there are, all at most.

    Source: ``expandTensors`` of aten/src/ATen/native/IndexingUtils.h, by way of nonzero.
    """
    found = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            size = index.numel() * index.dim() * INDEX
            found.append(Workspace("positions in a mask", size))
    return found


def _gathered(args: tuple) -> list[Workspace]:
    """NCCL gathers into one piece, which is then copied to the outputs.

    Source: ``ProcessGroupNCCL::allgather`` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
    """
    outputs = args[0][0]
    size = sum(t.numel() * t.element_size() for t in outputs)
    return [Workspace("all_gather's one piece", size)]


_aten: Any = torch.ops.aten
_c10d: Any = torch.ops.c10d

_FORMULAS: dict[Any, Callable[[tuple], list[Workspace]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash,
    _aten.embedding_dense_backward.default: _embedding,
    _aten.index.Tensor: _masked,
    _aten.index_put_.default: _masked,
    _aten.index_put.default: _masked,
}


def of_cuda_kernel(func: Any, args: tuple) -> list[Workspace]:
    """What CUDA's kernel for the operator `func`, called with `args`, asks for besides."""
    formula = _FORMULAS.get(func)
    if formula is None and func is _c10d.allgather_.default:
        formula = _gathered
    return [] if formula is None else [w for w in formula(args) if w.size]
