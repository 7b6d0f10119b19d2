"""Where two traces part, in plain words.

Traces are the same if they ask for the same sizes on the same streams and give the same blocks
back, in the same order. The numbers that blocks have do not matter, nor what asked for them, nor
which blocks were there before beyond their sizes. Phases are compared where both traces have them.

NOTE: one cause is counted once. The free of a block that only one trace has, or has with another
size, is no further difference.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron_memo.phases import START, Phase

from .alignment import Pairs, align, gaps
from .trace import Enter, Free, Malloc, Trace

AROUND = 3  # events shown before and after the first difference


class Kind(Enum):
    """How two traces differ at one place; the value names such places in a count."""

    RESIZED = "requests of another size"
    STREAM = "requests on another stream"
    ONLY_A = "requests only in A"
    ONLY_B = "requests only in B"
    MOVED = "frees at another time"
    FREED_ONLY_A = "frees only in A"
    FREED_ONLY_B = "frees only in B"
    SWAPPED = "frees of another block"
    PHASE = "events in another phase"


@dataclass(frozen=True)
class Difference:
    """One place where traces differ.

    Attributes:
        a, b: numbers of the events in their traces; None where a trace has no such event.
        next_a, next_b: the events at which the traces stand then.
    """

    kind: Kind
    a: int | None
    b: int | None
    next_a: int
    next_b: int


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        differences: in the order of the events.
        held_only_a, held_only_b: (bytes, stream) of blocks that are there at the beginning of one
            trace only, and how many.
    """

    a: Trace
    b: Trace
    differences: tuple[Difference, ...]
    held_only_a: Counter[tuple[int, int]]
    held_only_b: Counter[tuple[int, int]]

    @property
    def equal(self) -> bool:
        """Whether a plan for one trace is a plan for the other."""
        same_rounding = self.a.header.rounding == self.b.header.rounding
        return same_rounding and not (self.differences or self.held_only_a or self.held_only_b)


class _Side:
    """A trace as the comparison walks it: its requests and frees, without the phase markers."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.request: dict[int, Malloc] = {block.id: block for block in trace.held}
        self.held = frozenset(self.request)
        self.asked_at: dict[int, int] = {}  # id -> position
        self.freed_at: dict[int, int] = {}
        self.events: list[Malloc | Free] = []
        self.numbers: list[int] = []  # position -> number of the event in the trace
        self.phases: list[Phase] = []
        phase = START
        for number, event in enumerate(trace.events):
            if isinstance(event, Enter):
                phase = trace.phases[event.phase]
                continue
            if isinstance(event, Malloc):
                self.request[event.id] = event
                self.asked_at[event.id] = len(self.events)
            else:
                self.freed_at[event.id] = len(self.events)
            self.events.append(event)
            self.numbers.append(number)
            self.phases.append(phase)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def phased(self) -> bool:
        return any(phase != START for phase in self.phases)

    def number(self, position: int) -> int:
        """The event's number; one more than the last after the end."""
        return self.numbers[position] if position < len(self) else len(self.trace.events)

    def position(self, number: int) -> int:
        """The other way round."""
        return bisect.bisect_left(self.numbers, number)

    def tokens(self, names: dict[tuple[bool, int, int], int]) -> list[int]:
        """Equal numbers for equal events: kind, size and stream, not which block."""
        found = []
        for event in self.events:
            _, size, stream, _ = self.request[event.id]
            key = (isinstance(event, Malloc), size, stream)
            found.append(names.setdefault(key, len(names)))
        return found

    def kinds(self, positions: range) -> list[bool]:
        return [isinstance(self.events[position], Malloc) for position in positions]


def compare(a: Trace, b: Trace) -> Comparison:
    """All differences of two traces; takes seconds for a million events."""
    one, other = _Side(a), _Side(b)
    differences = tuple(_differences(one, other, _pairs(one, other)))
    held_a = Counter((block.size, block.stream) for block in a.held)
    held_b = Counter((block.size, block.stream) for block in b.held)
    return Comparison(a, b, differences, held_a - held_b, held_b - held_a)


def _pairs(one: _Side, other: _Side) -> Pairs:
    """Positions that belong together: equal events, then those of one kind between them."""
    names: dict[tuple[bool, int, int], int] = {}
    tokens_a, tokens_b = one.tokens(names), other.tokens(names)
    found = align(tokens_a, tokens_b)
    pairs = list(found)
    for gap_a, gap_b in gaps(found, len(one), len(other)):
        kinds_a, kinds_b = one.kinds(gap_a), other.kinds(gap_b)
        if kinds_a == kinds_b:  # the same steps with other sizes
            pairs += zip(gap_a, gap_b, strict=True)
            continue
        inside = align([tokens_a[i] for i in gap_a], [tokens_b[j] for j in gap_b], 1)
        pairs += [(gap_a[i], gap_b[j]) for i, j in inside]
        for rest_a, rest_b in gaps(inside, len(gap_a), len(gap_b)):
            alike = align([kinds_a[i] for i in rest_a], [kinds_b[j] for j in rest_b], 1)
            pairs += [(gap_a[rest_a[i]], gap_b[rest_b[j]]) for i, j in alike]
    return sorted(pairs)


def _steps(pairs: Pairs, a: int, b: int) -> Iterator[tuple[int, int, bool, bool]]:
    """(position in A, position in B, whether A moves, whether B moves), to the end of both."""
    at, bt = 0, 0
    for i, j in [*pairs, (a, b)]:
        while at < i:
            yield at, bt, True, False
            at += 1
        while bt < j:
            yield at, bt, False, True
            bt += 1
        if i < a or j < b:
            yield at, bt, True, True
            at, bt = at + 1, bt + 1


class _Matched:
    """Which blocks and frees belong together, from the pairs of positions."""

    def __init__(self, one: _Side, other: _Side, pairs: Pairs):
        self.one, self.other = one, other
        self.in_b: dict[int, int] = {}  # block of A -> block of B
        for i, j in pairs:
            event = one.events[i]
            if isinstance(event, Malloc):
                self.in_b[event.id] = other.events[j].id
        self.in_a = {block_b: block_a for block_a, block_b in self.in_b.items()}
        self.paired_a = {i for i, _ in pairs}
        self.paired_b = {j for _, j in pairs}
        self.phased = one.phased and other.phased

    def of_pair(self, i: int, j: int) -> Kind | None:
        """How two events that belong together differ."""
        event_a, event_b = self.one.events[i], self.other.events[j]
        if isinstance(event_a, Malloc) and isinstance(event_b, Malloc):
            if event_a.size != event_b.size:
                return Kind.RESIZED
            if event_a.stream != event_b.stream:
                return Kind.STREAM
        elif not self._same_block(event_a.id, event_b.id):
            return Kind.SWAPPED
        if self.phased and self.one.phases[i] != self.other.phases[j]:
            return Kind.PHASE
        return None

    def _same_block(self, block_a: int, block_b: int) -> bool:
        before_a, before_b = block_a in self.one.held, block_b in self.other.held
        if before_a or before_b:
            return before_a and before_b
        partner = self.in_b.get(block_a)
        if partner is None:  # both in one trace only, which was said at their requests
            return block_b not in self.in_a
        return partner == block_b

    def only_a(self, i: int, j: int) -> tuple[Kind, int | None] | None:
        """What an event of A without a partner says, and the event of B that it is about."""
        event = self.one.events[i]
        if isinstance(event, Malloc):
            return Kind.ONLY_A, None
        if event.id in self.one.held:
            return Kind.FREED_ONLY_A, None
        if event.id not in self.in_b:
            return None  # said at its request
        there = self.other.freed_at.get(self.in_b[event.id])
        if there is None or there in self.paired_b:
            return Kind.FREED_ONLY_A, None
        return (Kind.MOVED, there) if there >= j else None  # else said when B gave it back

    def only_b(self, i: int, j: int) -> tuple[Kind, int | None] | None:
        """The same for an event of B."""
        event = self.other.events[j]
        if isinstance(event, Malloc):
            return Kind.ONLY_B, None
        if event.id in self.other.held:
            return Kind.FREED_ONLY_B, None
        if event.id not in self.in_a:
            return None
        there = self.one.freed_at.get(self.in_a[event.id])
        if there is None or there in self.paired_a:
            return Kind.FREED_ONLY_B, None
        return (Kind.MOVED, there) if there >= i else None


def _differences(one: _Side, other: _Side, pairs: Pairs) -> Iterator[Difference]:
    matched = _Matched(one, other, pairs)
    for i, j, moves_a, moves_b in _steps(pairs, len(one), len(other)):
        k: int | None = None
        m: int | None = None
        if moves_a and moves_b:
            kind, k, m = matched.of_pair(i, j), i, j
        elif moves_a:
            k = i
            kind, m = matched.only_a(i, j) or (None, None)
        else:
            m = j
            kind, k = matched.only_b(i, j) or (None, None)
        if kind is not None:
            event_a = None if k is None else one.number(k)
            event_b = None if m is None else other.number(m)
            yield Difference(kind, event_a, event_b, one.number(i), other.number(j))


# ---- words


def explain(found: Comparison) -> list[str]:
    """The comparison in lines for the user, who knows the traces as A and B."""
    one, other = _Side(found.a), _Side(found.b)
    lines = []
    if found.equal:
        lines.append(f"the traces are equal: {_size(one)}")
    else:
        lines += [f"A: {_size(one)}", f"B: {_size(other)}"]
    if found.a.header.rounding != found.b.header.rounding:
        lines.append(
            f"A rounds requests up to {found.a.header.rounding} bytes, B to "
            f"{found.b.header.rounding}"
        )
    lines += _held_lines("A", found.held_only_a)
    lines += _held_lines("B", found.held_only_b)
    if found.differences:
        first = found.differences[0]
        lines.append(f"first difference: {_say(first, one, other)}")
        for name, side, at in (("A", one, first.next_a), ("B", other, first.next_b)):
            lines += _around(name, side, at)
        counts = Counter(difference.kind for difference in found.differences)
        told = ", ".join(f"{counts[kind]:,} {kind.value}" for kind in Kind if counts[kind])
        lines.append(f"in all: {told}")
    elif not found.equal:
        lines.append("the requests and frees of the window are equal")
    lines.append(_peaks(found))
    return lines


def _size(side: _Side) -> str:
    requests = len(side.asked_at)
    return f"{requests:,} requests, {len(side) - requests:,} frees"


def _held_lines(name: str, blocks: Counter[tuple[int, int]]) -> Iterator[str]:
    if blocks:
        total = sum(size * count for (size, _), count in blocks.items())
        yield (
            f"at the beginning {name} alone holds {blocks.total():,} more blocks, "
            f"{total:,} bytes; the largest has {max(size for size, _ in blocks):,}"
        )


def _peaks(found: Comparison) -> str:
    a, b = found.a.peak(), found.b.peak()
    return f"peak: {a:,} bytes in A, {b:,} in B ({b - a:+,} bytes, {(b - a) / a:+.2%})"


def _say(first: Difference, one: _Side, other: _Side) -> str:
    a = None if first.a is None else f"event {first.a} of A{_where(one, first.a)}"
    b = None if first.b is None else f"event {first.b} of B{_where(other, first.b)}"
    does_a = None if first.a is None else _does(one, first.a)
    does_b = None if first.b is None else _does(other, first.b)
    if first.kind is Kind.ONLY_A:
        return f"{a} {does_a}, B does not before its event {first.next_b}"
    if first.kind is Kind.ONLY_B:
        return f"{b} {does_b}, A does not before its event {first.next_a}"
    if first.kind is Kind.FREED_ONLY_A:
        return f"{a} {does_a}, B does not"
    if first.kind is Kind.FREED_ONLY_B:
        return f"{b} {does_b}, A does not"
    if first.kind is Kind.MOVED:
        return f"{a} {does_a}, and B does so at another time: {b} {does_b}"
    if first.kind is Kind.PHASE:
        return f"{a} and {b} are in other phases; both {does_a}"
    return f"{a} {does_a}, {b} {does_b}"


def _where(side: _Side, number: int) -> str:
    phase = side.phases[side.position(number)]
    return f" ({phase})" if phase != START else ""


def _does(side: _Side, number: int) -> str:
    event = side.trace.events[number]
    assert not isinstance(event, Enter)
    block = side.request[event.id]
    stream = f" on stream {block.stream}" if block.stream else ""
    what = f" for {block.what}" if block.what else ""
    if isinstance(event, Malloc):
        return f"asks for {block.size:,} bytes{stream}{what}"
    if block.id in side.held:
        return f"gives back {block.size:,} bytes{stream} from before the window ({block.what})"
    since = side.number(side.asked_at[block.id])
    return f"gives back the {block.size:,} bytes{stream} of event {since}{what}"


def _around(name: str, side: _Side, number: int) -> Iterator[str]:
    yield f"around event {number} of {name}:"
    at = side.position(number)
    for position in range(max(0, at - AROUND), min(len(side), at + AROUND + 1)):
        here = side.number(position)
        mark = ">" if position == at else " "
        yield f"  {mark} {here:>9}  {_does(side, here)}"
    if at == len(side):
        yield "  >            the end"
