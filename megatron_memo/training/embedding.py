"""The word embedding in token chunks, so that backward never holds a whole sequence's gradient.

Under sequence parallelism stock's backward gathers the gradient [s, b, h] from all ranks and
copies it once more, for the mask of the vocabulary's shards; over the memory of a layer in chunks
that is a model's peak. Here upstream's own lookup runs on the ids of one chunk at a time, so that
shards, reductions and deterministic mode mean what they mean in stock. The values are bitwise
stock's; the weight's gradient is a sum over chunks, in fp32 where the weight is 16-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_memo.layer.parameter_sum import ParameterSums
from megatron_memo.layer.rows import Rows, Target
from megatron_memo.training.loss_head import LossHead, cut


@contextmanager
def embedding_by(head: LossHead | None, model: nn.Module) -> Iterator[None]:
    """While the body runs, `model` looks its words up in as many chunks as `head` works in.

    NOTE: only the module's `forward` changes, for this one call of the model: hooks that DDP and
    others have on the module run once, and nothing of it is left in the model.

    Args:
        head: None or one chunk leaves the embedding to upstream.
        model: a GPT, wrapped as Megatron does. A stage without an embedding is left alone.
    """
    words = None if head is None or head.chunks == 1 else _word_embeddings(model)
    if words is None:
        yield
        return
    assert head is not None
    words.__dict__["forward"] = _in_chunks(words, words.forward, head.chunks)
    try:
        yield
    finally:
        del words.__dict__["forward"]


def _word_embeddings(model: Any) -> Any:
    """Upstream's VocabParallelEmbedding in the first stage, and where further tokens are."""
    while hasattr(model, "module"):
        model = model.module
    return getattr(getattr(model, "embedding", None), "word_embeddings", None)


def _in_chunks(
    words: Any, whole: Callable[[Tensor], Tensor], chunks: int
) -> Callable[[Tensor], Tensor]:
    """A forward for `words` that calls `whole`, its own, on one chunk of the ids at a time."""

    def forward(ids: Tensor) -> Tensor:
        # Upstream's fused weight gradients are the linear layers'; a lookup's goes by autograd.
        sums = ParameterSums(words, chunks=chunks, fusion=False)
        target, tokens = Target(), []
        scatters = words.reduce_scatter_embeddings
        # Scattered: [b, s] -> [s / tp, b, h], each rank its stretch. Else any shape, plus h.
        ranks = words.tp_group.size() if scatters else 1
        by_token = ids.transpose(0, 1).contiguous() if scatters else ids.reshape(-1)
        for rows in cut(chunks, ranks, by_token.shape[0] // ranks):
            some = rows.take(by_token)
            with sums.of_one_chunk():
                part = whole(some.transpose(0, 1) if scatters else some)
            tokens.append(target.put(Rows(1, rows.n, rows.start, rows.stop), part))
            del part  # or it would last until the next chunk has its own
        joined = target.join(tokens)
        return joined if scatters else joined.view(*ids.shape, -1)

    return forward
