#!/usr/bin/env python3
"""What the planned allocator costs a request on the CPU, and what it saves in page faults.

    python benchmarks/allocator.py                      the tables
    python benchmarks/allocator.py --csv FILE           and the numbers in a file

Times are of allocate + free, in C++, in interleaved rounds of one run: each round goes through all
modes in turn, so that what the machine does meanwhile falls on all of them; the median over rounds
counts. Written means that every byte is written once in between, as a kernel's output is. Page
faults are the minor faults of the process per training step of two small networks; their column
of ratios is to off, which allocates natively.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# Threads come and go, and with them page faults that are none of the allocator's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from megatron_memo import native_build  # noqa: E402
from megatron_memo.allocator import build  # noqa: E402
from megatron_memo.allocator.errors import AllocatorError  # noqa: E402
from megatron_memo.allocator.face import Allocator, PlanEntry, get_allocator  # noqa: E402
from megatron_memo.allocator.record import to_trace  # noqa: E402
from megatron_memo.phases import START  # noqa: E402
from megatron_memo.plan import portfolio  # noqa: E402
from megatron_memo.plan.problem import Buffer, Problem  # noqa: E402
from megatron_memo.profile.trace import Header, rounded  # noqa: E402

SIZES = {"64 B": 64, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
MODES = ("native", "off", "record", "replay")
# Pairs between two looks at the clock; also the entries of the plan that replay follows.
PAIRS = {"64 B": 5000, "1 MiB": 1000, "64 MiB": 50}
PAIRS_WRITTEN = {"64 B": 5000, "1 MiB": 50, "64 MiB": 2}
WARM_UP_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: `value` in one mode, and its ratio to that of the native allocator."""

    measure: str
    size: str
    mode: str
    value: float
    ratio: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--steps", type=int, default=20, help="training steps for page faults")
    parser.add_argument("--csv", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    for name in ("rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        loop = build_loop()
        allocator = get_allocator("cpu")
    except (AllocatorError, native_build.NativeError) as error:
        sys.exit(str(error))
    allocator.set_filter(1)
    rows = []
    for written, pairs in ((False, PAIRS), (True, PAIRS_WRITTEN)):
        for name in SIZES:
            rows += time_modes(allocator, loop, name, pairs[name], written, options.rounds)
    rows += page_faults(allocator, options.steps)
    print(table(rows))
    if options.csv is not None:
        write_csv(options.csv, rows)
        print(f"written: {options.csv}")


def build_loop() -> ctypes.PyDLL:
    """The compiled loop; remembers the allocator that is in place now."""
    source = Path(__file__).parent / "allocator_loop.cpp"
    made = dataclasses.replace(
        build.recipe("cpu"), name="allocator-loop", sources=(source,), headers=()
    )
    loop = ctypes.PyDLL(str(native_build.build(made)))
    loop.loop_run.restype = ctypes.c_double
    loop.loop_run.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    loop.loop_remember()
    return loop


def time_modes(
    allocator: Allocator, loop: ctypes.PyDLL, name: str, pairs: int, written: bool, rounds: int
) -> list[Row]:
    size = SIZES[name]
    allocator.load_plan([PlanEntry(0, size, 0, 0)] * pairs, size)
    enter_mode: dict[str, Callable[[], None]] = {
        "native": allocator.off,
        "off": allocator.off,
        "record": allocator.start_recording,
        "replay": allocator.replay,
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):  # the first warms up
        for mode in MODES:
            enter_mode[mode]()
            allocator.reset_stats()
            allocator.begin_iteration()
            allocator.enter(0)
            taken = loop.loop_run(mode == "native", size, pairs, written) / pairs
            allocator.end_iteration()
            if mode == "replay":
                assert allocator.stats().hits == pairs
            if number:
                seconds[mode].append(taken)
    allocator.off()
    measure = "ns, written" if written else "ns"
    medians = {mode: statistics.median(seconds[mode]) for mode in MODES}
    return [
        Row(measure, name, mode, value, value / medians["native"])
        for mode, value in medians.items()
    ]


class Scale(nn.Module):
    """A layer that costs memory rather than time: one parameter a column, and GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * self.weight)


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Name and size of the activations -> a network and its input. Beyond 32 MiB glibc maps every
    block anew."""
    small = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.GELU())]
    return {
        "1 MiB": (nn.Sequential(*small), torch.randn(512, 512)),
        "48 MiB": (nn.Sequential(*(Scale(2048) for _ in range(4))), torch.randn(6144, 2048)),
    }


def page_faults(allocator: Allocator, steps: int) -> list[Row]:
    """Minor faults per training step, with the native allocator and following a plan."""
    rows = []
    for name, (network, x) in networks().items():
        optimizer = torch.optim.Adam(network.parameters())

        def step(
            network: nn.Module = network,
            x: torch.Tensor = x,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            allocator.begin_iteration()
            allocator.enter(0)
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            allocator.end_iteration()

        allocator.off()
        counts = {"off": faults(step, steps)}
        allocator.start_recording()
        step()
        plan_from(allocator, allocator.stop_recording())
        allocator.replay()
        counts["replay"] = faults(step, steps)
        allocator.off()
        base = max(counts["off"], 1.0)
        rows += [Row("page faults a step", name, mode, n, n / base) for mode, n in counts.items()]
    return rows


def faults(step: Callable[[], None], steps: int) -> float:
    for _ in range(WARM_UP_STEPS):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


def plan_from(allocator: Allocator, raw: object) -> None:
    header = Header("allocator", device="cpu", rounding=allocator.alignment)
    blocks = to_trace(raw, {0: START}, header).blocks()
    placed = [block for block in blocks if block.upper is not None]
    buffers = [
        Buffer(str(b.id), b.lower, b.upper, rounded(b.size, allocator.alignment)) for b in placed
    ]
    best = portfolio.solve(Problem(tuple(buffers)), time_limit=20, use_cp_sat=False).best
    offsets = dict(zip((b.id for b in placed), best.offsets, strict=True))
    entries = [PlanEntry(0, b.size, b.stream, offsets.get(b.id)) for b in blocks]
    allocator.load_plan(entries, best.peak)


def table(rows: list[Row]) -> str:
    lines = [f"{'measure':20} {'size':>8} {'mode':>8} {'value':>14} {'to native':>10}"]
    for row in rows:
        lines.append(
            f"{row.measure:20} {row.size:>8} {row.mode:>8} {row.value:14,.1f} {row.ratio:9.2f}x"
        )
    return "\n".join(lines)


def write_csv(path: Path, rows: list[Row]) -> None:
    """The table with, in comment lines, the command, the machine and the version of torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/allocator.py", *sys.argv[1:]])
    with path.open("w", newline="") as file:
        file.write(f"# {command}\n# {os.cpu_count()} CPU cores, {platform.machine()}; ")
        file.write(f"torch {torch.__version__}\n")
        writer = csv.DictWriter(file, fieldnames=[field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


if __name__ == "__main__":
    main()
