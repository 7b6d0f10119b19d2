"""What of a swapping layer is on the device, step by step, where a depth in steps bounds it.

NOTE: steps
-----------
A layer has a step for each chunk up to the attention, one for the attention, one for each chunk
after it, and one for a mixture of experts. What a step made stays for `depth` more steps of the
forward. In backward, which walks the steps down, what a step reads first is there `depth` steps
ahead, and until the last step that reads it. The layer below goes on where this one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_memo.config import Experts as Policy
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
        experts: what becomes of what a mixture saves.
    """

    def __init__(
        self,
        sizes: Sizes,
        chunks: Sequence[tuple[float, Fate]],
        depth: int,
        experts: Policy = Policy.SWAP,
    ) -> None:
        self.attention = len(chunks)
        self.count = 2 * len(chunks) + 1 + bool(sizes.mixture)
        self._depth = depth
        self._layers = depth // self.count + 2  # that the depth reaches into
        self._sizes = sizes
        self._always: list[_Item] = []
        self._others: list[_Item] = []
        dropped = [k for k, (_, fate) in enumerate(chunks) if fate is Fate.RECOMPUTE]
        last = 2 * len(chunks)
        reads_input = self._post(dropped[-1]) if dropped else self.attention - 1
        self._always += [
            _item(sizes.hidden, 0, reads_input, 0),
            _item(sizes.attended + sizes.statistics, self.attention, last, self.attention),
        ]
        if sizes.mixture:
            moved, at = sizes.moved_mixture(experts), self.count - 1
            self._others.append(_item(moved, at, at, at))
        for k, (share, fate) in enumerate(chunks):
            if fate is Fate.SWAP:
                self._others += self._of_chunk(k, share, len(chunks) - len(dropped))

    def _post(self, chunk: int) -> int:
        return self.attention + 1 + chunk

    def _of_chunk(self, chunk: int, share: float, swapped: int) -> Iterator[_Item]:
        sizes, post = self._sizes, self._post(chunk)
        yield _item(share * sizes.before, chunk, chunk, chunk)
        # They come back into their rows of whole q, k and v.
        whole = sizes.qkv / swapped
        yield _Item(share * sizes.qkv, whole, chunk, self.attention, self.attention)
        yield _item(share * sizes.after, post, post, post)

    def forward(self, step: int) -> int:
        """Bytes beside the layer's own input and attention output, while `step` is at work."""
        oldest = step - self._depth
        own = sum(item.nbytes * self._made_since(item, oldest, step, 0) for item in self._others)
        before = sum(item.nbytes * self._made_since(item, oldest, step, 1) for item in self._always)
        return round(own + before)

    def _made_since(self, item: _Item, oldest: int, step: int, layer: int) -> int:
        """How many of the kind were made from step `oldest` to `step`, by the layer that is at work
        (0) or those before it, whose steps are below 0."""
        return sum(oldest <= item.made - n * self.count <= step for n in range(layer, self._layers))

    def left_behind(self, retired: int) -> int:
        """Bytes of a micro-batch that has gone forward through all layers, when so many portions
        have been given up since."""
        oldest, end = self.count - self._depth + retired, self.count - 1
        items = (*self._always, *self._others)
        return round(sum(i.nbytes * self._made_since(i, oldest, end, 0) for i in items))

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
