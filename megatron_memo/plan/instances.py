"""Made-up problems for tests and benchmarks: reproducible, of any size, of known difficulty.

Each function returns (lower, upper, size) triples.
"""

from __future__ import annotations

import random

Triples = list[tuple[int, int, int]]


def perfect(count: int, times: int, height: int, seed: int) -> Triples:
    """A rectangle cut by straight cuts: the load is `height` all the time, and a layout without a
    single unused byte exists. Hundreds of buffers are hard."""
    rng = random.Random(seed)
    # Splitting the largest pieces first keeps sizes within one order of magnitude or so.
    pieces = [(0, times, 0, height)]
    while len(pieces) < count:
        areas = [(b - a) / times * (d - c) / height * rng.random() for a, b, c, d in pieces]
        a, b, c, d = piece = pieces.pop(areas.index(max(areas)))
        along_time = ((b - a) / times > (d - c) / height) != (rng.random() < 0.3)
        if along_time and b - a > 1:
            cut = rng.randint(a + 1, b - 1)
            pieces += [(a, cut, c, d), (cut, b, c, d)]
        elif not along_time and d - c > 1:
            cut = rng.randint(c + 1, d - 1)
            pieces += [(a, b, c, cut), (a, b, cut, d)]
        else:
            pieces.append(piece)
            if all(b - a == 1 and d - c == 1 for a, b, c, d in pieces):
                break
    rng.shuffle(pieces)
    return [(a, b, d - c) for a, b, c, d in pieces]


def saturated(count: int, height: int, live: int, seed: int) -> Triples:
    """The load is `height` all the time; what ends is replaced by buffers of other sizes, about
    `live` at once. Fragmentation often makes `height` impossible to meet."""
    rng = random.Random(seed)
    done: Triples = []

    def parts(total: int) -> list[int]:
        sizes = []
        while total > 0:
            sizes.append(min(total, rng.randint(1, max(1, 2 * height // live))))
            total -= sizes[-1]
        return sizes

    time = 0
    alive = [(0, size) for size in parts(height)]
    while len(done) + len(alive) < count:
        time += 1
        rng.shuffle(alive)
        ending = rng.randint(1, max(1, len(alive) // 2))
        freed = sum(size for _, size in alive[:ending])
        done += [(start, time, size) for start, size in alive[:ending]]
        alive = alive[ending:] + [(time, size) for size in parts(freed)]
    return done + [(start, time + 1, size) for start, size in alive]


def transformer(
    layers: int,
    seed: int,
    *,
    kept: int = 10,
    forward: int = 40,
    backward: int = 60,
    jitter: float = 0.3,
    unit: int = 1 << 25,
    rounding: int = 512,
) -> Triples:
    """One training iteration: every layer has the same pattern of short-lived buffers, forward and
    backward, and `kept` buffers that live from its forward to its backward (0: swapped out). Sizes
    vary by +-jitter between layers, as experts of a mixture do."""
    rng = random.Random(seed)
    scales = (0.25, 0.5, 0.5, 1, 1, 1, 1, 1, 2, 2, 3, 4, 4)
    buffers: Triples = []
    time = 0

    def size(scale: float) -> int:
        amount = scale * unit * (1 + rng.uniform(-jitter, jitter))
        return max(1, round(amount / rounding)) * rounding

    def pattern(count: int) -> list[tuple[float, int]]:
        # (scale, further buffers born before this one dies)
        return [(rng.choice(scales), rng.choice((1, 1, 1, 2, 3, 5))) for _ in range(count)]

    def run(steps: list[tuple[float, int]]) -> None:
        nonlocal time
        ends: dict[int, list[tuple[int, int]]] = {}
        for k, (scale, span) in enumerate(steps):
            ends.setdefault(k + span, []).append((time, size(scale)))
            time += 1
            for start, amount in ends.pop(k, []):
                buffers.append((start, time, amount))
                time += 1
        for late in sorted(ends):
            for start, amount in ends[late]:
                buffers.append((start, time, amount))
                time += 1

    front, back = pattern(forward), pattern(backward)
    kept_scales = [rng.choice(scales) for _ in range(kept)]
    alive: list[list[tuple[int, int]]] = []
    for _ in range(layers):
        mine = [(time + k, size(scale)) for k, scale in enumerate(kept_scales)]
        time += kept
        run(front)
        alive.append(mine)
    while alive:
        run(back)
        for start, amount in alive.pop():
            buffers.append((start, time, amount))
            time += 1
    return buffers
