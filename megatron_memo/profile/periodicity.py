"""Is every layer's share of a trace the same? Asserted, not assumed: planning rests on it.

A layer's pass is what it asks for, in order, and when each block is given back: within the pass,
in which later pass of its own, or how many layers later. Layers may differ for reasons that their
place in the model explains: the first ones have nobody before them, the last ones turn from
forward to backward, and the resident ones keep what they make; so may the first and last
micro-batches. Where a pipeline stage takes up micro-batches before it is through with others, the
schedule decides what is in flight: there only passes of one virtual stage are compared that have
the same passes around them, and of a block that outlives its pass only that it does. Where DDP
finds a bucket of gradients full and looks for NaNs in it is decided by the bucket's size, not by
layers, so those requests are left out. Anything else is a fault of the layer or of the trace, and
is told with the first request that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_memo.phases import BACKWARD, FORWARD, LAYER, Phase
from megatron_memo.profile.trace import Enter, Free, Malloc, Trace

Key = tuple[int | None, int, int, str]  # stage, layer, micro-batch, direction of a pass

# So many layers at either end of a model chunk have no neighbour that the others have: the layers
# in flight and, where none is resident, the one whose output the first of those keeps as its input.
ENDS = 3
# The same of micro-batches: the first and the last ones.
BATCH_ENDS = 2
# What DDP asks for when it looks at a full bucket (--overlap-grad-reduce, check_for_nan_in_grad).
OF_BUCKETS = ("aten.linalg_vector_norm.default", "aten.isnan.default", "aten.isinf.default")
# Passes before and after one that decide what is in flight during it: two layers forward, and two
# more until those are retired.
AROUND = 4


class Request(NamedTuple):
    """One request of a pass.

    Attributes:
        end: where the block is given back: "here 3" (before the pass's request number 3), or
            "forward +2" (in that pass of the layer that comes two later), "other", "never".
    """

    chunk: int | None
    size: int
    what: str
    end: str

    def __str__(self) -> str:
        where = f" in chunk {self.chunk}" if self.chunk is not None else ""
        return f"{self.size} bytes by {self.what}{where}, given back {self.end}"


@dataclass(frozen=True)
class Pass:
    """One direction of one layer for one micro-batch."""

    stage: int | None
    layer: int
    micro_batch: int
    direction: str
    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return f"layer {self.layer} {self.direction} of micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class LayerKind:
    """Layers that ask for the same.

    Attributes:
        name: A, B, ... by the first layer that is of it.
        layers: their numbers.
        passes: forward and backward of the first one, first micro-batch.
    """

    name: str
    layers: tuple[int, ...]
    passes: tuple[Pass, ...]


class PeriodicityError(ValueError):
    """Layers that should be alike differ. The message is one line."""


def layer_passes(trace: Trace) -> list[Pass]:
    """Every layer's passes in the order in which they begin, without DDP's own requests."""
    places: dict[Key, list[tuple[int, Malloc]]] = {}  # pass -> (phase, request)
    owner: dict[int, tuple[Key, int]] = {}  # block -> its pass and number there
    ends: dict[int, tuple[int, Key | None, int]] = {}  # block -> phase, pass, requests so far
    phase = 0
    for event in trace.events:
        if isinstance(event, Enter):
            phase = event.phase
            continue
        key = _pass_of(trace.phases[phase])
        if isinstance(event, Malloc):
            bucket = key is not None and key[3] == BACKWARD and event.what in OF_BUCKETS
            if key is not None and not bucket:
                requests = places.setdefault(key, [])
                owner[event.id] = key, len(requests)
                requests.append((phase, event))
        elif event.id in owner:
            ends[event.id] = phase, key, len(places.get(key, ())) if key is not None else 0

    def end_of(block: Malloc, key: Key) -> str:
        if block.id not in ends:
            return "never"
        number, where, count = ends[block.id]
        if where == key:
            return f"here {count}"
        last = trace.phases[number]
        if where is None:
            return f"{last.part} {last.direction}".strip()
        later = where[3] if where[2] == key[2] and where[0] == key[0] else None
        step = (last.layer or 0) - key[1]
        other = "" if later is not None else " of another micro-batch"
        return f"{last.direction} {step:+d}{other}"

    return [
        Pass(
            *key,
            requests=tuple(
                Request(trace.phases[at].chunk, block.size, block.what, end_of(block, key))
                for at, block in requests
            ),
        )
        for key, requests in places.items()
    ]


def _pass_of(phase: Phase) -> Key | None:
    if phase.part != LAYER or phase.direction not in (FORWARD, BACKWARD):
        return None
    assert phase.layer is not None and phase.micro_batch is not None, phase
    return phase.stage, phase.layer, phase.micro_batch, phase.direction


def layer_kinds(trace: Trace, resident: Sequence[int] = ()) -> list[LayerKind]:
    """The kinds of layers in a trace, each with the passes that all its layers make.

    Args:
        trace: of one rank.
        resident: numbers of the layers that keep their activations on the device.

    Raises:
        PeriodicityError: layers whose place in the model explains no difference differ.
    """
    passes = layer_passes(trace)
    _check(passes, frozenset(resident))
    first: dict[tuple[int | None, int], list[Pass]] = {}
    for one in passes:
        if one.micro_batch == 0:
            first.setdefault((one.stage, one.layer), []).append(one)
    kinds: dict[tuple, list[int]] = {}
    for (_, layer), own in first.items():
        kinds.setdefault(tuple((p.direction, p.requests) for p in own), []).append(layer)
    return [
        LayerKind(_letters(n), tuple(layers), tuple(first[_stage_of(first, layers[0]), layers[0]]))
        for n, layers in enumerate(kinds.values())
    ]


def _stage_of(first: dict[tuple[int | None, int], list[Pass]], layer: int) -> int | None:
    return next(stage for stage, number in first if number == layer)


def describe(kinds: Sequence[LayerKind]) -> str:
    """ "30 layers of kind A, 2 of kind B"."""
    parts = [f"{len(kind.layers)} of kind {kind.name}" for kind in kinds]
    if parts:
        parts[0] = parts[0].replace(
            " of", " layers of" if len(kinds[0].layers) > 1 else " layer of"
        )
    return ", ".join(parts) or "no layers"


def check_same(first: Trace, second: Trace) -> None:
    """Two iterations ask for the same, request by request, and give back in the same order.

    Raises:
        PeriodicityError: where they part.
    """
    for number, (one, other) in enumerate(zip(_story(first), _story(second), strict=False)):
        if one != other:
            raise PeriodicityError(
                f"iterations {first.header.iteration} and {second.header.iteration} differ at "
                f"event {number}: {one} in one and {other} in the other"
            )
    if len(first.events) != len(second.events):
        raise PeriodicityError(
            f"iterations {first.header.iteration} and {second.header.iteration} differ: "
            f"{len(first.events)} and {len(second.events)} events"
        )


def _story(trace: Trace) -> Iterator[str]:
    numbers: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Malloc):
            numbers[event.id] = len(numbers)
            yield f"{event.size} bytes by {event.what}"
        elif isinstance(event, Free):
            # Blocks from before may be of the set-up in one and of the last iteration in the other.
            yield f"end of block {numbers.get(event.id, 'from before')}"
        else:
            yield str(trace.phases[event.phase])


def _check(passes: Sequence[Pass], resident: frozenset[int]) -> None:
    """Passes of one place must be alike."""
    bounds: dict[int | None, tuple[int, int]] = {}
    batches: dict[int | None, int] = {}
    for one in passes:
        low, high = bounds.get(one.stage, (one.layer, one.layer))
        bounds[one.stage] = min(low, one.layer), max(high, one.layer)
        batches[one.stage] = max(batches.get(one.stage, 0), one.micro_batch)
    models: dict[tuple, Pass] = {}
    mixed = _interleaved(passes)
    if mixed:
        passes = [replace(p, requests=tuple(map(_roughly, p.requests))) for p in passes]
    for number, one in enumerate(passes):
        low, high = bounds[one.stage]
        # A layer's neighbours decide what it meets at its ends; so do theirs, where they swap.
        from_start = min(one.layer - low, ENDS)
        from_end = min(high - one.layer, ENDS)
        near = tuple(layer in resident for layer in range(one.layer - ENDS, one.layer + ENDS + 1))
        batch: tuple = (
            min(one.micro_batch, BATCH_ENDS),
            min(batches[one.stage] - one.micro_batch, BATCH_ENDS),
        )
        if mixed:
            batch = one.stage, *_around(passes, number)
        model = models.setdefault((from_start, from_end, near, batch, one.direction), one)
        if model.requests != one.requests:
            raise PeriodicityError(_first_difference(model, one))


def _around(passes: Sequence[Pass], number: int) -> Iterator[tuple | None]:
    """What runs before and after a pass, seen from it."""
    one = passes[number]
    for k in range(number - AROUND, number + AROUND + 1):
        if not 0 <= k < len(passes):
            yield None
            continue
        other = passes[k]
        same = other.micro_batch == one.micro_batch, other.stage == one.stage
        yield other.direction, other.layer - one.layer, *same


def _interleaved(passes: Sequence[Pass]) -> bool:
    """Whether a micro-batch's forward begins while another one's backward is still to come."""
    forward: set[tuple[int | None, int]] = set()
    for one in passes:
        if one.direction == FORWARD:
            forward.add((one.stage, one.micro_batch))
            if len(forward) > 1:
                return True
        else:
            forward.discard((one.stage, one.micro_batch))
    return False


def _roughly(request: Request) -> Request:
    return request if request.end.startswith("here") else request._replace(end="later")


def _first_difference(model: Pass, other: Pass) -> str:
    for number, (a, b) in enumerate(zip(model.requests, other.requests, strict=False)):
        if a != b:
            return f"request {number} differs: {model} asks for {a}, {other} for {b}"
    return f"{model} makes {len(model.requests)} requests, {other} {len(other.requests)}"


def _letters(n: int) -> str:
    return (_letters(n // 26 - 1) if n >= 26 else "") + chr(ord("A") + n % 26)
