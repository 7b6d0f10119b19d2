#!/usr/bin/env python3
"""Step time and peak memory of the loss head: stock's, and memo's in several numbers of chunks.

    python benchmarks/loss_head.py                                  one process
    torchrun --nproc-per-node 2 benchmarks/loss_head.py             tp 2 + sequence parallelism
    python benchmarks/loss_head.py --device cuda --sequence 131072 --hidden 4096 --vocabulary 128256

A step is the output projection and the cross entropy of one sequence, forward and backward, from
given hidden states. Measured as in benchmarks/layer.py: everything in one run, as ratios to stock,
each round in turn. Memo's backward computes the logits again: four products with the weight where
stock has three, so that 1.33 is what to expect where these are all the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layer import Way, table  # noqa: E402
from ranks import peak_of, start_ranks, wait  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_memo.training.loss_head import LossHead  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768, help="padded (default: 32768)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    start_ranks(options.device)
    ways = measure(options)
    if dist.get_rank() == 0:
        print(table(ways))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[Way]:
    """Every way, timed in rounds and metered once."""
    layer, losses_of = build(options)
    tp = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(options.sequence // tp, 1, options.hidden, device=options.device)
    hidden = hidden.to(layer.weight.dtype).requires_grad_()
    labels = torch.randint(options.vocabulary, (1, options.sequence), device=options.device)
    grad = torch.ones(labels.shape, device=options.device)

    def stock() -> Tensor:
        logits, _ = layer(hidden)
        return losses_of(labels, logits)

    def chunked(head: LossHead) -> Callable[[], Tensor]:
        return lambda: head(
            hidden_states=hidden,
            output_layer=layer,
            output_weight=None,
            labels=labels,
            compute_language_model_loss=losses_of,
            scale_logits=lambda logits: logits,
        )

    ways = [Way("stock", stock, [])]
    ways += [Way(f"{count} chunks", chunked(LossHead(count)), []) for count in options.chunks]

    def step(way: Way) -> None:
        hidden.grad = layer.weight.grad = None
        way.block().backward(grad)

    steps = len(ways) * (options.rounds + 2)
    with tqdm(total=steps, desc="steps", disable=dist.get_rank() != 0) as progress:
        for way in ways:
            step(way)  # lazy buffers
            hidden.grad = layer.weight.grad = None
            way.peak_bytes = peak_of(lambda way=way: step(way), options.device)
            progress.update(2)
        for _ in range(options.rounds):
            for way in ways:
                wait(options.device)
                start = time.perf_counter()
                step(way)
                wait(options.device)
                way.seconds.append(time.perf_counter() - start)
                progress.update()
    return ways


def build(options: argparse.Namespace) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
    """Upstream's output layer, and its cross entropy of labels [b, s] and logits [s, b, v / tp]."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp = dist.get_world_size()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=tp,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=options.device == "cpu",
        gradient_accumulation_fusion=False,
    )
    layer = ColumnParallelLinear(
        options.hidden,
        options.vocabulary,
        config=config,
        init_method=torch.nn.init.xavier_normal_,
        bias=False,
        gather_output=False,
    )

    def losses_of(labels: Tensor, logits: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()

    return layer, losses_of


if __name__ == "__main__":
    main()
