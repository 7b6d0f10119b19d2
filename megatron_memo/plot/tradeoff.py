"""What memory costs in time: over swap ratios at one length, and over lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_memo.config import DEFAULT_RESIDENT_LAYERS
from megatron_memo.estimate.answer import Answer, answer
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.strategies import (
    FineGrainedOffload,
    FullRecompute,
    Memo,
    Stock,
    Strategy,
)
from megatron_memo.estimate.table import tokens_words
from megatron_memo.estimate.ways import best_memo
from megatron_memo.plot.figure import Axis, Fact, Figure, Limit, Line, Panel, Unit
from megatron_memo.plot.palette import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    YELLOW,
    Colour,
)
from megatron_memo.plot.words import job_words, machine_words
from megatron_memo.sizes import size_words

_MORE_CHUNKS = 4  # times the layer's own choice
_OF_MEMO = (BLUE, SKY, GREEN, YELLOW)
_RATIOS = 8
_FIXED = ((0.0, SKY), (0.5, BLUE), (1.0, PINK))
_FITS = "filled: fits the machine; hollow: does not"


def pareto(costs: Costs, reserve: int, *, ratios: int = _RATIOS) -> Figure:
    """Step time against device and host memory over ratios, chunk counts and resident layers.

    The frontier is of the points that fit: none is faster with less memory of that kind.

    Args:
        costs: of the job on its machine.
        reserve: bytes of a GPU that tensors may not have.
        ratios: how many steps from 0 to 1.
    """
    memo = best_memo(costs, reserve)
    found: dict[str, list[Answer]] = {}
    own = replace(memo, chunks=None).chunked(costs.job) or 1
    for chunks in (own, own * _MORE_CHUNKS):
        for resident in (DEFAULT_RESIDENT_LAYERS, 0):
            name = f"memo, {chunks} chunks, {resident or 'no'} resident layers"
            kind = replace(memo, chunks=chunks, resident=resident)
            try:
                found[name] = [
                    answer(costs, replace(kind, ratio=k / ratios), reserve=reserve)
                    for k in range(ratios + 1)
                ]
            except ValueError:
                continue  # more chunks than tokens
    others = [answer(costs, way, reserve=reserve) for way in _others(costs)]
    gpu, host = costs.machine.gpu.memory - reserve, costs.machine.host_memory_of_gpu
    lines = [
        Line(
            [one.peak.parts.total for one in row],
            [one.result.seconds for one in row],
            name,
            colour,
            markers=True,
            ends=("ratio 0", "ratio 1") if not k else None,
            hollow=[not one.fits for one in row],
            facts=_facts(row),
        )
        for k, ((name, row), colour) in enumerate(zip(found.items(), _OF_MEMO, strict=False))
    ]
    # Host bytes are those of the layers that swap, whatever the chunks.
    on_host = [
        replace(line, x=[one.host_bytes for one in row])
        for line, (name, row) in zip(lines, found.items(), strict=True)
        if name.startswith(f"memo, {own} ")
    ]
    every = [one for row in found.values() for one in row]
    gpu_limit = Limit(f"GPU, less reserve: {size_words(gpu)}", x=gpu)
    host_limit = Limit(f"a GPU's share: {size_words(host)}", x=host)
    device = Axis("device memory of one GPU", Unit.BYTES, log=True)
    seconds = Axis("step time", Unit.SECONDS)
    best = [_line_of_best(every, on_device=True)], [_line_of_best(every, on_device=False)]
    panels = (
        Panel(
            "All ways",
            device,
            seconds,
            lines=(*(replace(line, ends=None) for line in lines), *_points(others)),
            limits=(gpu_limit,),
        ),
        Panel(
            "Memo, device memory",
            replace(device, log=False),
            seconds,
            lines=(*lines, *filter(None, best[0])),
        ),
        Panel(
            "Memo, host memory",
            Axis("host memory of one GPU's rank", Unit.BYTES),
            seconds,
            lines=(*on_host, *filter(None, best[1])),
            limits=(host_limit,),
        ),
    )
    notes = (
        f"{job_words(costs)}. Each line goes over swap ratios from 0 to 1; {_FITS}.",
        "Memory by arithmetic, times simulated from the GPU's datasheet: predictions.",
    )
    return Figure("pareto", "What a faster step costs in memory", notes, panels)


def curve(costs: Costs, tokens: Sequence[int], reserve: int) -> Figure:
    """Keep, recompute, offload: step time and device memory over sequence lengths.

    Args:
        costs: of the job on its machine; its own length is not looked at.
        tokens: lengths, ascending.
        reserve: bytes of a GPU that tensors may not have.

    Raises:
        ValueError: a length that the layout does not divide.
    """
    rows: dict[str, list[Answer]] = {}
    colours: dict[str, Colour] = {}
    kept: list[float] = []
    for length in tokens:
        there = Costs(replace(costs.job, sequence=length), costs.machine, costs.efficiency)
        for name, colour, way in _ways(there, reserve):
            colours[name] = colour
            rows.setdefault(name, []).append(answer(there, way, reserve=reserve))
        kept.append(rows["keep all"][-1].result.seconds)
    gpu = costs.machine.gpu.memory - reserve
    lengths = Axis("sequence length", Unit.TOKENS, log=True)
    time, memory = [], []
    for name, row in rows.items():
        relative = [one.result.seconds / base for one, base in zip(row, kept, strict=True)]
        line = Line(
            list(tokens),
            relative,
            name,
            colours[name],
            dashed=name == "keep all",
            markers=True,
            hollow=[not one.fits for one in row],
            facts=_facts(row),
        )
        time.append(line)
        memory.append(replace(line, y=[one.peak.parts.total for one in row]))
    longest = ", ".join(f"{name} ({_longest(row, tokens)})" for name, row in rows.items())
    notes = (
        f"{machine_words(costs)}; {_FITS}. Longest that fits: {longest}.",
        "Memory by arithmetic, times simulated from the GPU's datasheet: predictions.",
    )
    panels = (
        Panel(
            "Step time, as a multiple of keeping everything",
            lengths,
            Axis("step time / keep all", Unit.NUMBER),
            lines=tuple(time),
        ),
        Panel(
            "Device memory",
            lengths,
            Axis("device memory of one GPU", Unit.BYTES, log=True),
            lines=tuple(memory),
            limits=(Limit(f"GPU, less reserve: {size_words(gpu)}", y=gpu),),
        ),
    )
    return Figure("curve", "Keep, recompute or offload", notes, panels)


def _ways(costs: Costs, reserve: int) -> list[tuple[str, Colour, Strategy]]:
    memo = best_memo(costs, reserve)
    fixed = [
        (f"memo, ratio {ratio:g}", colour, replace(memo, ratio=ratio)) for ratio, colour in _FIXED
    ]
    dense = [] if costs.job.experts else [("fine-grained offload", ORANGE, FineGrainedOffload())]
    return [
        ("keep all", GREY, Stock()),
        ("full recompute", VERMILION, FullRecompute()),
        *dense,
        *fixed,
        ("memo, best ratio", GREEN, memo),
    ]


def _others(costs: Costs) -> list[Strategy]:
    dense: list[Strategy] = [] if costs.job.experts else [FineGrainedOffload()]
    return [Stock(), FullRecompute(), *dense]


def _points(answers: Iterable[Answer]) -> list[Line]:
    names = {"stock": ("keep all", GREY), "full recompute": ("full recompute", VERMILION)}
    found = []
    for one in answers:
        label, colour = names.get(one.name, (one.name, ORANGE))
        found.append(
            Line(
                [one.peak.parts.total],
                [one.result.seconds],
                label,
                colour,
                markers=True,
                join=False,
                hollow=[not one.fits],
                facts=_facts([one]),
            )
        )
    return found


def _line_of_best(answers: Iterable[Answer], *, on_device: bool) -> Line | None:
    """Those that fit and that none with less memory is as fast as; None if nothing fits."""

    def used(one: Answer) -> int:
        return one.peak.parts.total if on_device else one.host_bytes

    best: list[Answer] = []
    fitting = [one for one in answers if one.fits]
    for one in sorted(fitting, key=lambda one: (used(one), one.result.seconds)):
        if not best or one.result.seconds < best[-1].result.seconds:
            best.append(one)
    if not best:
        return None
    seconds = [one.result.seconds for one in best]
    nbytes = [used(one) for one in best]
    return Line(nbytes, seconds, "best that fit", INK, dashed=True, facts=_facts(best))


def _facts(answers: Sequence[Answer]) -> tuple[Fact, ...]:
    names, places = list[str](), list[int]()
    for one in answers:
        way = one.strategy
        chunks = way.chunks if isinstance(way, Memo) else None
        words = [one.name if chunks is None else f"{one.name}, {chunks} chunks"]
        words += one.problems or ("fits",)
        places.append(len(names))
        names.append("; ".join(words))
    return (
        Fact("", places, names=tuple(names)),
        Fact("device", [one.peak.parts.total for one in answers], Unit.BYTES),
        Fact("host", [one.host_bytes for one in answers], Unit.BYTES),
        Fact("step", [one.result.seconds for one in answers], Unit.SECONDS),
        Fact("MFU, full", [one.result.mfu_full for one in answers], Unit.SHARE),
        Fact("MFU, causal", [one.result.mfu_causal for one in answers], Unit.SHARE),
    )


def _longest(row: Sequence[Answer], tokens: Sequence[int]) -> str:
    fitting = [length for one, length in zip(row, tokens, strict=True) if one.fits]
    return tokens_words(max(fitting)) if fitting else "none"
