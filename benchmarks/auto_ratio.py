#!/usr/bin/env python3
"""The ratio that `auto` finds against a sweep of fixed ones, over a link made slow, on CPU.

    python benchmarks/auto_ratio.py                              one process
    torchrun --nproc-per-node 2 benchmarks/auto_ratio.py         tp 2 + sequence parallelism

One small Llama-style GPT. `auto` is training's own `AutoRatio`: it measures three steps and solves.
Then every round times each ratio once, in turn, so that what the machine does meanwhile falls on
all of them; each timed step follows two untimed ones of the same ratio: the first finds out how
much host memory it takes, the second takes it in one piece.
Unless --link is given, the link is so slow that moving everything takes --slow times a layer's
forward, so that the best ratio lies inside. Writes a CSV to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import start_ranks, wait  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron_memo.config import PROVISIONAL_RATIO, MemoConfig  # noqa: E402
from megatron_memo.sizes import parse_size, size_words  # noqa: E402

FIXED = (0.0, 0.25, 0.5, 0.75, 1.0)
VOCABULARY = 256
UNTIMED = 2


@dataclass
class Way:
    """A ratio and the seconds of its timed steps."""

    name: str
    ratio: float
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--slow", type=float, default=2.0, help="see above (default: 2)")
    parser.add_argument("--link", type=parse_size, help="bytes a second instead, as in 200MiB")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--output", type=Path, help="CSV (default: benchmarks/results/...)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    start_ranks("cpu")
    ways, link = measure(options)
    if dist.get_rank() == 0:
        fixed = min((way for way in ways if way.name != "auto"), key=lambda way: way.median)
        print(f"link {size_words(link)}/s")
        for way in ways:
            print(
                f"{way.name:6} ratio {way.ratio:.4f}  {way.median:.3f} s  "
                f"{way.median / fixed.median:.3f}x of the best fixed ratio"
            )
        path = options.output or ROOT / "benchmarks" / "results" / "auto_ratio.csv"
        write_csv(path, ways, fixed, link)
        print(f"written: {path}")
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> tuple[list[Way], int]:
    """Every way, timed in rounds; the link's bytes a second."""
    from megatron_memo.layer.transformer_layer import MemoTransformerLayer
    from megatron_memo.swap.engine import set_engine

    memo = MemoConfig(PROVISIONAL_RATIO, options.chunks, 0)
    model = build(options, memo)
    layers = [module for module in model.modules() if isinstance(module, MemoTransformerLayer)]
    tokens = torch.randint(VOCABULARY, (1, options.sequence))
    places = torch.arange(options.sequence)[None]

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(tokens, places, None, labels=tokens).mean().backward()

    def set_memo(**change: Any) -> None:
        for layer in layers:
            layer.memo = replace(layer.memo, **change)

    link = options.link or slow_link(options, model, step)
    set_memo(link_bandwidth=link)
    set_engine(None)
    ways = [Way("auto", run_auto(model, step)[0].ratio)]
    ways += [Way(f"{ratio:g}", ratio) for ratio in FIXED]
    for _ in tqdm(range(options.rounds), desc="rounds", disable=dist.get_rank() != 0):
        for way in ways:
            set_memo(swap_ratio=way.ratio)
            for _ in range(UNTIMED):
                step()
            wait("cpu")
            start = time.perf_counter()
            step()
            wait("cpu")
            way.seconds.append(time.perf_counter() - start)
    return ways, link


def slow_link(options: argparse.Namespace, model: Any, step: Callable[[], None]) -> int:
    """Bytes a second over which all of a layer takes `--slow` times its forward; of rank 0."""
    (measured,) = run_auto(model, step)[1]
    speed = (measured.always + measured.others) / (options.slow * measured.forward.total)
    told = [int(speed)]
    dist.broadcast_object_list(told)
    return told[0]


def run_auto(model: Any, step: Callable[[], None]) -> tuple[Any, list[Any]]:
    """`AutoRatio` over three steps, without limits of memory; what was measured."""
    from megatron_memo.plan.ratio import Problem, solve
    from megatron_memo.plan.ratio.cost import Decision, cost
    from megatron_memo.swap.engine import get_engine
    from megatron_memo.training.auto_ratio import WEIGHED, AutoRatio
    from megatron_memo.training.layer_times import HostClock, LayerWatch
    from megatron_memo.training.link_probe import measure_link
    from megatron_memo.training.telling import gather

    seen: list[Any] = []

    def problem(measured: Any) -> Problem:
        return measured.problem(host=1 << 40)

    def choose(measured: Any) -> Any:
        seen.append(measured)
        return solve(problem(measured))

    def predict(measured: Any, ratio: float) -> float:
        of = problem(measured)
        return cost(of, Decision(round(ratio * of.rows), 0.0, of.depths[0])).step

    def waited() -> float:
        stats = get_engine().stats()
        return (stats["exposed_d2h_s"] or 0.0) + (stats["exposed_h2d_s"] or 0.0)

    auto = AutoRatio(
        known=lambda: None,
        watch=LayerWatch(HostClock(), waited),
        stats=lambda: get_engine().stats(),
        probe=lambda: measure_link(get_engine().backend, torch.device("cpu"), dist.barrier),
        solve=choose,
        predict=predict,
        fits=lambda _ratio: True,
        device_room=lambda _always: None,
        gather=gather,
        release=lambda: get_engine().host.give_up_idle(),
        save=lambda _ranks, _ratio: None,
        log=lambda line: print(line) if dist.get_rank() == 0 else None,
    )
    auto.begin([model])
    for iteration in range(1, WEIGHED + 1):
        auto.step(iteration, step)
    return auto, seen


def build(options: argparse.Namespace, memo: MemoConfig) -> Any:
    """A Llama-style GPT: RMSNorm, SwiGLU, RoPE, no biases."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_memo.layer.spec import memo_spec
    from megatron_memo.ops.norm import norm

    tp = dist.get_world_size()
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        ffn_hidden_size=options.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    layer = memo_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), config, memo)
    spec = TransformerBlockSubmodules(layer_specs=[layer] * options.layers, layer_norm=norm)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=options.sequence,
        position_embedding_type="rope",
    ).train()


def write_csv(path: Path, ways: list[Way], fixed: Way, link: int) -> None:
    """A line for each way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("way", "ratio", "seconds", "of_best_fixed", "link_bytes_per_second"))
        for way in ways:
            share = way.median / fixed.median
            rows.writerow((way.name, f"{way.ratio:.5f}", f"{way.median:.4f}", f"{share:.4f}", link))


if __name__ == "__main__":
    main()
