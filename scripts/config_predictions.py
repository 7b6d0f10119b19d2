#!/usr/bin/env python3
"""Writes into each config what the estimate predicts for it, as comments at its head.

    python scripts/config_predictions.py            all of configs/, in seconds to a minute
    python scripts/config_predictions.py --check    changes nothing; status 1 if one is out of date

The numbers are those of `megatron-memo estimate --quick` for the nodes that the config names, with
A800 GPUs of 80 GB and 2 TiB of host memory a node. A config that does not fit is refused. Of the
quickstart's config, which is for CPUs, the memory is predicted, from a profile; no datasheet tells
the speed of a CPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from lib.config import Config, read_config
from lib.launch import ROOT
from lib.prediction import CPU_RATIO, RATIO, Prediction, chosen_ratio, is_auto, predict
from megatron_memo.estimate.flags import read_run, with_flag
from megatron_memo.estimate.profiled import profiled_peak
from megatron_memo.estimate.table import seconds_words
from megatron_memo.plan.atomic_file import whole_file
from megatron_memo.sizes import size_words

_BEGIN = "# Predicted by `megatron-memo estimate`, not measured (scripts/config_predictions.py):\n"
_BLOCK = re.compile(re.escape(_BEGIN) + r"(?:#     .*\n)*")
_RATIO = re.compile(r"#     swap ratio +([\d.]+)")
_GIB, _WIDTH = 1 << 30, 80
_CPU_DEVICE = 4 << 30  # which settings like the loss head's chunks follow


def block(prediction: Prediction) -> str:
    """The comment of a config."""
    one, result, machine = prediction.answer, prediction.answer.result, prediction.machine
    parts = [f"{name} {_gib(n)}" for name, n in one.peak.parts.by_name().items() if n]
    rows = (
        ("on", f"{prediction.config.nodes} x {machine.gpus} {machine.gpu.name}"),
        ("swap ratio", f"{prediction.ratio:.3f}: of those that fit, with the shortest step"),
        (
            "GPU",
            f"{_gib(one.peak.parts.total)} of {_gib(machine.gpu.memory)} GiB at most, in "
            f"{one.peak.where}",
        ),
        *(("", line) for line in textwrap.wrap(", ".join(parts), _WIDTH)),
        (
            "host",
            f"{_gib(one.host_bytes * machine.gpus)} of {_gib(machine.host_memory)} GiB of a node",
        ),
        (
            "step",
            f"{seconds_words(result.seconds)}, {result.tokens_per_second:.0f} tokens/s, "
            f"MFU {result.mfu_causal:.1%} causal, {result.mfu_full:.1%} full",
        ),
    )
    return _BEGIN + "".join(f"#     {name:<12}{text}\n" for name, text in rows)


def cpu_block(config: Config) -> str:
    """The comment of a config for CPUs, whose memory is profiled."""
    words = with_flag(config.flags(), RATIO, str(CPU_RATIO))
    job = read_run(words, config.nodes * config.ranks_per_node).job
    peak = profiled_peak(
        [*words, "--mock-data"],
        job,
        stage=0,
        device="cpu",
        device_bytes=_CPU_DEVICE,
        tell=lambda _words: None,
    )
    rows = (
        ("on", f"{config.ranks_per_node} ranks on a CPU"),
        ("swap ratio", f"{CPU_RATIO:.3f}: as the quickstart trains it"),
        ("device", f"{size_words(peak.parts.total)} of a rank at most, in {peak.where}"),
        ("host", f"{size_words(peak.host_bytes)} of a rank, for what is swapped"),
        ("step", "not predicted: `megatron-memo calibrate` measures what this CPU reaches"),
    )
    return _BEGIN + "".join(f"#     {name:<12}{text}\n" for name, text in rows)


def stated(text: str) -> tuple[str, float] | None:
    """The comment in a config's text, and the ratio that it is of; None without one."""
    found = _BLOCK.search(text)
    if found is None:
        return None
    ratio = _RATIO.search(found[0])
    return (found[0], float(ratio[1])) if ratio else None


def with_block(text: str, new: str) -> str:
    """A config's text with the comment, in the place of the old one or at the head's end."""
    kept = _BLOCK.sub("", text)
    lines = kept.splitlines(keepends=True)
    head = next((k for k, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join([*lines[:head], new, *lines[head:]])


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f}".removesuffix(".0")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="config_predictions.py",
        description="Writes into each config what the estimate predicts for it.",
    )
    parser.add_argument("configs", nargs="*", type=Path, help="default: all of configs/")
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    args = parser.parse_args(argv)
    status = 0
    for path in args.configs or sorted((ROOT / "configs").glob("*.yaml")):
        config = read_config(path)
        if is_auto(config):
            prediction = predict(config, chosen_ratio(config))
            if not prediction.answer.fits:
                problems = "; ".join(prediction.answer.problems)
                print(f"{path}: does not fit: {problems}", file=sys.stderr)
                status = 1
                continue
            comment = block(prediction)
        else:
            comment = cpu_block(config)
        text = path.read_text()
        new = with_block(text, comment)
        if new == text:
            continue
        if args.check:
            print(f"{path}: out of date", file=sys.stderr)
            status = 1
        else:
            with whole_file(path) as file:
                file.write(new)
            print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
