"""Policy: the steps of a layer, and how many of them activations stay in flight."""

from dataclasses import dataclass

from megatron_memo.config import MemoConfig

LAYERS = 2  # what is in flight of more layers than this helps nobody: the paper's two buffers
WINDOW_TOKENS = 1 << 18  # `auto` has so many tokens' worth of one layer in flight


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
    flight hides all from 192K on; four steps of eight chunks would leave more than half of the
    copies standing there. At 1M, a quarter of a layer in flight leaves 6% of the step, of swapping
    everything, and takes 12 GiB less than a whole layer.

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
