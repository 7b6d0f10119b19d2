#!/usr/bin/env python3
"""Step time and peak memory of a block of layers: stock, full recompute, memo at three ratios.

    python benchmarks/layer.py                                  one process
    torchrun --nproc-per-node 2 benchmarks/layer.py             tp 2 + sequence parallelism
    python benchmarks/layer.py --device cuda --sequence 131072 --hidden 4096 --heads 32 --ffn 11008

Everything is measured in one run and given as a ratio to stock: each round times every way once, in
turn, so that what the machine does meanwhile falls on all of them; the median over rounds counts.
Stock is upstream's TransformerLayer over the same modules as memo. Writes a CSV with the machine
and the versions to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform as host_platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import peak_of, start_ranks, wait  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_memo.config import MemoConfig, depth_from_text  # noqa: E402

FULL_RECOMPUTE = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


@dataclass
class Way:
    """One way to run the block; seconds a round, peak bytes above what is there between steps."""

    name: str
    block: Any
    seconds: list[float]
    peak_bytes: int = 0
    host_bytes: int = 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--query-groups", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--sequence", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.5, 0.0])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--resident-layers", type=int, default=0)
    parser.add_argument("--prefetch-depth", default="auto", help="steps, auto or layers")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--output", type=Path, help="CSV (default: benchmarks/results/...)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    start_ranks(options.device)
    results = measure(options)
    if dist.get_rank() == 0:
        print(table(results))
        path = options.output or _default_output(options)
        write_csv(path, options, results)
        print(f"written: {path}")
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[Way]:
    """Every way, timed in rounds and metered once."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_memo.swap.engine import get_engine, set_engine

    ways = [
        Way("stock", build(options, None), []),
        Way("full recompute", build(options, None, **FULL_RECOMPUTE), []),
    ]
    for ratio in options.ratios:
        memo = MemoConfig(
            ratio,
            options.chunks,
            options.resident_layers,
            prefetch_depth=depth_from_text(options.prefetch_depth),
        )
        ways.append(Way(f"memo {ratio:g}", build(options, memo), []))
    tp = dist.get_world_size()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    torch.manual_seed(dist.get_rank())
    shape = (options.sequence // tp, 1, options.hidden)
    x, grad = (torch.randn(shape, device=options.device).to(dtype) for _ in range(2))
    x.requires_grad_()
    rope = RotaryEmbedding(
        options.hidden // options.heads, 1.0, use_cpu_initialization=options.device == "cpu"
    )(options.sequence)

    def step(way: Way) -> None:
        x.grad = None
        y = way.block(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)
        y.backward(grad)

    progress = tqdm(
        total=len(ways) * (options.rounds + 2), desc="steps", disable=dist.get_rank() != 0
    )
    for way in ways:  # allocates .grad, host memory, lazy buffers; then the peak
        set_engine(None)
        step(way)
        progress.update()
        way.peak_bytes = peak_of(lambda way=way: step(way), options.device)
        way.host_bytes = int(get_engine().stats()["host_bytes"])
        progress.update()
    for _ in range(options.rounds):
        for way in ways:
            wait(options.device)
            start = time.perf_counter()
            step(way)
            wait(options.device)
            way.seconds.append(time.perf_counter() - start)
            progress.update()
    progress.close()
    return ways


def build(options: argparse.Namespace, memo: MemoConfig | None, **other: Any) -> Any:
    """A Llama-style block: RMSNorm, SwiGLU, grouped queries, RoPE, no biases."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_memo.layer.spec import memo_spec
    from megatron_memo.ops.norm import norm

    tp = dist.get_world_size()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        num_query_groups=options.query_groups,
        ffn_hidden_size=options.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=options.device == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=options.device == "cuda",
        bias_dropout_fusion=options.device == "cuda",
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **other,
    )
    layer = memo_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), config, memo)
    spec = TransformerBlockSubmodules(layer_specs=[layer] * options.layers, layer_norm=norm)
    return TransformerBlock(config, spec, post_layer_norm=False).to(options.device).train()


def table(ways: list[Way]) -> str:
    """A line for each way; ratios to stock, round by round."""
    lines = [f"{'':16}{'time':>8}{'spread':>16}{'peak':>8}{'peak MB':>10}{'host MB':>10}"]
    for row in rows(ways):
        lines.append(
            f"{row['way']:16}{row['time_ratio']:>7.3f}x"
            f"{row['time_ratio_low']:>8.3f}..{row['time_ratio_high']:.3f}"
            f"{row['peak_ratio']:>8.3f}{row['peak_bytes'] / 1e6:>10.1f}"
            f"{row['host_bytes'] / 1e6:>10.1f}"
        )
    return "\n".join(lines)


def rows(ways: list[Way]) -> list[dict[str, Any]]:
    """One dict for each way; a round's ratio is to stock in the same round."""
    stock = ways[0]
    answer = []
    for way in ways:
        ratios = [mine / base for mine, base in zip(way.seconds, stock.seconds, strict=True)]
        answer.append(
            dict(
                way=way.name,
                time_ratio=statistics.median(ratios),
                time_ratio_low=min(ratios),
                time_ratio_high=max(ratios),
                seconds=statistics.median(way.seconds),
                peak_ratio=way.peak_bytes / stock.peak_bytes,
                peak_bytes=way.peak_bytes,
                host_bytes=way.host_bytes,
            )
        )
    return answer


def write_csv(path: Path, options: argparse.Namespace, ways: list[Way]) -> None:
    """The table with, in comment lines, the command, the machine and the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    launcher = f"torchrun --nproc-per-node {dist.get_world_size()} "
    command = (launcher if dist.get_world_size() > 1 else "python ") + " ".join(
        ["benchmarks/layer.py", *sys.argv[1:]]
    )
    machine = (
        f"{torch.cuda.get_device_name()}, {dist.get_world_size()} rank(s)"
        if options.device == "cuda"
        else f"{os.cpu_count()} CPU cores, {host_platform.machine()}, "
        f"{dist.get_world_size()} rank(s) of {torch.get_num_threads()} thread(s)"
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    shape = {k: v for k, v in vars(options).items() if k not in ("output", "ratios")}
    with open(path, "w", newline="") as file:
        file.write(f"# {command}\n# {machine}; {versions}\n# {shape}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows(ways)[0]))
        writer.writeheader()
        writer.writerows(rows(ways))


def _default_output(options: argparse.Namespace) -> Path:
    name = f"layer_{options.device}_tp{dist.get_world_size()}_s{options.sequence}.csv"
    return ROOT / "benchmarks" / "results" / name


if __name__ == "__main__":
    main()
