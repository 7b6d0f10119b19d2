"""What of a swapping layer is on the device, step by step, where a depth in steps bounds it.

NOTE: steps
-----------
A layer has a step for each chunk up to the attention, one for the attention, and one for each chunk
after it. What a step made stays for `depth` more steps of the forward. In backward, which walks the
steps down, what a step reads first is there `depth` steps ahead, and until the last step that reads
it. The layer below goes on where this one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_memo.estimate.tensors import Sizes
from megatron_memo.layer.chunks import Fate


@dataclass(frozen=True)
class _Item:
    """Bytes that travel together.

    Attributes:
        nbytes: that forward made.
        back: that they take in backward.
        made: the step of forward that makes them.
        first, last: the steps of backward between which they are read; first is the larger.
    """

    nbytes: float
    back: float
    made: int
    first: int
    last: int


def _item(nbytes: float, made: int, first: int, last: int) -> _Item:
    return _Item(nbytes, nbytes, made, first, last)


class InFlight:
    """Of one layer.

    Args:
        sizes: the layer's tensors.
        chunks: share of the tokens, and fate, of each chunk.
        depth: in steps.
    """

    def __init__(self, sizes: Sizes, chunks: Sequence[tuple[float, Fate]], depth: int) -> None:
        self.attention = len(chunks)
        self.count = 2 * len(chunks) + 1
        self._depth = depth
        self._layers = depth // self.count + 2  # that the depth reaches into
        self._sizes = sizes
        self._always: list[_Item] = []
        self._others: list[_Item] = []
        dropped = [k for k, (_, fate) in enumerate(chunks) if fate is Fate.RECOMPUTE]
        last = self.count - 1
        reads_input = self._post(dropped[-1]) if dropped else self.attention - 1
        self._always += [
            _item(sizes.hidden, 0, reads_input, 0),
            _item(sizes.query + sizes.statistics, self.attention, last, self.attention),
        ]
        for k, (share, fate) in enumerate(chunks):
            if fate is Fate.SWAP:
                self._others += self._of_chunk(k, share, len(chunks) - len(dropped))

    def _post(self, chunk: int) -> int:
        return self.attention + 1 + chunk

    def _of_chunk(self, chunk: int, share: float, swapped: int) -> Iterator[_Item]:
        sizes, post = self._sizes, self._post(chunk)
        yield _item(share * (sizes.hidden + sizes.tables), chunk, chunk, chunk)
        # They come back into their rows of whole q, k and v.
        whole = sizes.qkv / swapped
        yield _Item(share * sizes.qkv, whole, chunk, self.attention, self.attention)
        yield _item(share * (2 * sizes.hidden + sizes.mlp), post, post, post)

    def forward(self, step: int) -> int:
        """Bytes beside the layer's own input and attention output, while `step` is at work."""
        own = sum(item.nbytes * self._made_within(item, step, 0) for item in self._others)
        before = sum(item.nbytes * self._made_within(item, step, 1) for item in self._always)
        return round(own + before)

    def _made_within(self, item: _Item, step: int, layer: int) -> int:
        """How many of the kind were made in `step` or at most `depth` before it, by the layer that
        is at work (0) or those before it."""
        oldest = step - self._depth
        return sum(oldest <= item.made - n * self.count <= step for n in range(layer, self._layers))

    def backward(self, step: int) -> int:
        """Bytes that are there while backward is in `step`, of this layer and of those below."""
        total = 0.0
        oldest = step - self._depth
        for item in (*self._always, *self._others):
            for layer in range(self._layers):
                first, last = (at - layer * self.count for at in (item.first, item.last))
                if last <= step and first >= oldest:
                    total += item.back
        return round(total)

    def rows_at_turn(self) -> int:
        """Bytes of q, k and v that forward made and that are still there as backward begins."""
        newest = self.count - self._depth
        rows = (item for item in self._others if item.first == self.attention)
        return round(sum(item.nbytes for item in rows if item.made >= newest))
