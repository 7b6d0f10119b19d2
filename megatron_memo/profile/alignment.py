"""Which positions of two long sequences belong together.

Made for event streams: long equal stretches, few differences, and much that repeats (layers,
micro-batches), so that nothing is unique and a difference is best bridged by the shortest skip.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

Pairs = list[tuple[int, int]]

# This many equal positions in a row end a difference.
_AGREEMENT = 8
_FAR = 1000


def align(a: Sequence[Hashable], b: Sequence[Hashable], agreement: int = _AGREEMENT) -> Pairs:
    """Positions of `a` and `b` with equal values, both rising.

    Equal stretches are followed; where they end, the shortest skip is taken
    after which `agreement` values agree, or all that are left. The steps taken are proportional to
    the lengths.
    """
    pairs: Pairs = []
    at, bt = 0, 0
    while at < len(a) and bt < len(b):
        if a[at] == b[bt]:
            pairs.append((at, bt))
            at += 1
            bt += 1
            continue
        skip = _shortest_skip(a, at, b, bt, agreement)
        if skip is None:
            break
        at, bt = at + skip[0], bt + skip[1]
    return pairs


def gaps(pairs: Pairs, a: int, b: int) -> Iterator[tuple[range, range]]:
    """The stretches of two sequences of lengths `a` and `b` between their pairs."""
    before_a, before_b = 0, 0
    for i, j in [*pairs, (a, b)]:
        if i > before_a or j > before_b:
            yield range(before_a, i), range(before_b, j)
        before_a, before_b = i + 1, j + 1


def _shortest_skip(
    a: Sequence[Hashable], at: int, b: Sequence[Hashable], bt: int, agreement: int
) -> tuple[int, int] | None:
    """(i, j) with the smallest larger one, so that `a` from at + i and `b` from bt + j agree.

    Of several, the one after which they agree for longest, and then the one that skips in both:
    a changed value is likelier than one that went and one that came.
    """
    seen_a: dict[tuple, int] = {}
    seen_b: dict[tuple, int] = {}
    for depth in range(max(len(a) - at, len(b) - bt)):
        here_a = tuple(a[at + depth : at + depth + agreement])
        here_b = tuple(b[bt + depth : bt + depth + agreement])
        if here_a:
            seen_a.setdefault(here_a, depth)
        if here_b:
            seen_b.setdefault(here_b, depth)
        skips = []
        if here_a in seen_b:
            skips.append((depth, seen_b[here_a]))
        if here_b in seen_a:
            skips.append((seen_a[here_b], depth))
        if skips:
            return max(skips, key=lambda s: (_agree_for(a, at + s[0], b, bt + s[1]), s[0] == s[1]))
    return None


def _agree_for(a: Sequence[Hashable], at: int, b: Sequence[Hashable], bt: int) -> int:
    """How many values agree from here on, counted no further than is worth it."""
    count = 0
    for x, y in zip(a[at : at + _FAR], b[bt : bt + _FAR], strict=False):
        if x != y:
            break
        count += 1
    return count
