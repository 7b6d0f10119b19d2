"""A profile on tensors without data against the real allocator of a real run: event by event."""

import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from megatron_memo.profile.fingerprint import differences
from megatron_memo.profile.trace import Free, Malloc, Trace, read_trace

REAL = Path(__file__).resolve().parent / "real_allocator.py"

# What no trace on tensors without data can see on the CPU. Nothing else may differ.
KERNELS_WITH_BUFFERS = (
    "aten::native_layer_norm_backward",  # partial sums of the weight's gradient, by thread
    "aten::_scaled_dot_product_flash_attention_for_cpu",  # a tile of scores, by thread
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)
GENERATOR_STATE = 5056  # bytes, copied when random streams are switched; on CUDA it is no request
NUMBER = 8  # bytes: Python numbers that operators wrap, and results of one element


def told(trace: Trace) -> list[tuple[str, int, str]]:
    """Mallocs and frees, in order, of blocks that were asked for in the window."""
    asked: dict[int, Malloc] = {}
    found = []
    for event in trace.events:
        if isinstance(event, Malloc):
            asked[event.id] = event
            found.append(("malloc", event.size, event.what))
        elif isinstance(event, Free) and event.id in asked:
            found.append(("free", asked[event.id].size, asked[event.id].what))
    return [e for e in found if e[1] > NUMBER and e[1] != GENERATOR_STATE]


def peak(events: list[tuple[str, int, str]]) -> int:
    alive = most = 0
    for kind, size, _ in events:
        alive += size if kind == "malloc" else -size
        most = max(most, alive)
    return most


@pytest.mark.parametrize("run", ["gpt-stock", "gpt-memo", "llama-stock", "llama-memo"])
def test_every_request_is_that_of_the_real_allocator(tmp_path, start, flags, run):
    real_file, profile_file = tmp_path / "real.trace.jsonl", tmp_path / "profile.trace.jsonl"
    kernels = ",".join(KERNELS_WITH_BUFFERS)
    worker = "megatron_memo.profile.worker"
    running = [
        start(sys.executable, str(REAL), str(real_file), kernels, *flags[run]),
        start(
            *(sys.executable, "-m", worker, "--say-to", "1", "--device", "cpu"),
            *("--out", str(profile_file), "--", *flags[run]),
        ),
    ]
    for process in running:
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, said[-4000:]
    in_training, in_profile = read_trace(real_file), read_trace(profile_file)
    assert differences(in_training.header.fingerprint, in_profile.header.fingerprint) == []
    real, profiled = told(in_training), told(in_profile)
    assert len(real) > 1000
    for number, (theirs, ours) in enumerate(zip_longest(real, profiled)):
        assert theirs is not None and ours is not None, (number, theirs, ours)
        assert theirs[:2] == ours[:2], (number, theirs, ours)
    assert peak(real) == peak(profiled)
