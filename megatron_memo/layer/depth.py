"""Policy: the steps of a layer, and how many of them activations stay in flight."""

from dataclasses import dataclass

from megatron_memo.config import MemoConfig

LAYERS = 2  # what is in flight of more layers than this helps nobody: the paper's two buffers
WINDOW_TOKENS = 1 << 20  # `auto` has so many tokens' worth of one layer in flight


@dataclass(frozen=True)
class Steps:
    """A layer's steps in the order of its forward: each chunk up to the attention, the attention,
    each chunk after it, a mixture of experts over all chunks.

    Attributes:
        chunks: of the layer.
        experts: the layer has a mixture of experts.
    """

    chunks: int
    experts: bool = False

    def pre(self, chunk: int) -> int:
        return chunk

    @property
    def attention(self) -> int:
        return self.chunks

    def post(self, chunk: int) -> int:
        return self.chunks + 1 + chunk

    @property
    def last_chunk(self) -> int:
        """Of the steps that have a chunk."""
        return 2 * self.chunks

    @property
    def count(self) -> int:
        return 2 * self.chunks + 1 + self.experts


def prefetch_steps(memo: MemoConfig, steps: Steps, tokens: int) -> int | None:
    """Steps for which activations stay on the device after they were made and before they are read.

    Copies of token-wise chunks take longer than the few matrix products of the chunks; at long
    context it is attention's time that hides them. Only what is in flight while an attention runs
    can be copied in its time, so to hide everything, all that lies between two attentions must be
    in flight: one layer's steps. `auto` is that, up to WINDOW_TOKENS. Beyond them it keeps the
    bytes in flight constant instead, so fewer steps: memory is what is short there, and what is no
    longer hidden is small beside an attention that grows with the square of the tokens.

    In numbers, for a 7B model whose full swap begins to be free at 192K tokens (MEMO's figure; half
    of s^2 in attention, backward 2.49 times forward): copies of s million tokens' layer take
    0.264 s, its matrix products 0.053 s, its attention 1.126 s^2 in one unit of time. One layer in
    flight hides all from 192K on. By the simulated iteration (estimate.timeline, everything
    swapped, eight chunks, 17 steps a layer) eight steps lengthen the step by 22% at 192K tokens,
    5% at 1M, 2.5% at 2M; four by 28%, 6.4%, 3.3%, and by 1.7% at 4M. So beyond WINDOW_TOKENS `auto`
    costs some 2%. Where memory is short before, four steps at 1M take 12 GiB less than 17, without
    resident layers.

    Args:
        memo: the policy and its number.
        steps: of the layer.
        tokens: of the whole sequence.

    Returns:
        Steps; None for two layers (`layers`, as in the paper). A number of more than two layers'
        steps counts as two layers' steps.
    """
    if memo.prefetch_depth == "layers":
        return None
    if memo.prefetch_depth == "auto":
        return max(min(steps.count, steps.count * WINDOW_TOKENS // tokens), 1)
    assert isinstance(memo.prefetch_depth, int)
    return min(memo.prefetch_depth, LAYERS * steps.count)
