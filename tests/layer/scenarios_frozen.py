"""What the worker processes do about parameters that are not trained (see scenarios)."""

import gc

import torch
from harness import HIDDEN, Result, block, config, data, differing, fresh_engine
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from scenarios import EVERYTHING, Counter, memo
from torch import nn

from megatron_memo.swap.engine import get_engine

TOKENS, RANK = 40, 4


class Adapted(nn.Module):
    """A linear layer of Megatron's with a low-rank adapter beside it."""

    def __init__(self, base, rank=RANK):
        super().__init__()
        self.base = base
        out, width = base.weight.shape
        self.down = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.up = nn.Parameter(torch.randn(out, rank) * 0.1)

    def forward(self, x, *args, **kwargs):
        y, bias = self.base(x, *args, **kwargs)
        return y + (x @ self.down.t()) @ self.up.t(), bias


def _adapters(built):
    torch.manual_seed(3)
    for layer in built.layers:
        for owner, name in (
            (layer.self_attention, "linear_qkv"), (layer.self_attention, "linear_proj"),
            (layer.mlp, "linear_fc1"), (layer.mlp, "linear_fc2"),
        ):  # fmt: skip
            setattr(owner, name, Adapted(getattr(owner, name)))
    _train(built, lambda name: name.endswith(("down", "up")))


def _train(built, wanted):
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(wanted(name))


# Name -> (what is done to a block, whether the model's input has a gradient).
CASES = {
    "embedding": (lambda built: None, False),
    "a layer": (lambda built: _train(built, lambda name: "layers.1." not in name), True),
    "first layers": (lambda built: _train(built, lambda name: "layers.3." in name), False),
    "all but norms": (lambda built: _train(built, lambda name: "norm" in name), True),
    "all but biases": (lambda built: _train(built, lambda name: name.endswith("bias")), False),
    "all but adapters": (_adapters, False),
}


def _run(built, given, has_gradient):
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    for parameter in built.parameters():
        parameter.grad = None
    x = given.inputs[0].clone().requires_grad_(has_gradient)
    y = built(hidden_states=x, attention_mask=None, rotary_pos_emb=given.rope)
    y.backward(given.output_grads[0])
    # Megatron computes no gradient for the bias of a frozen weight.
    grads = {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
    assert all(p.grad is None for p in built.parameters() if not p.requires_grad)
    return Result([y.detach().clone()], [x.grad] if has_gradient else [], grads)


def frozen():
    """By case: what differs from stock, GEMM operations above stock's, what a pass leaves."""
    cfg = config("gpt", layers=4, dropout=0.1)
    given = data(cfg, TOKENS)
    answer = {}
    for name, (change, has_gradient) in CASES.items():

        def run_with(settings, change=change, has_gradient=has_gradient):
            fresh_engine()
            built = block(cfg, settings)
            change(built)
            with Counter() as counter:
                result = _run(built, given, has_gradient)
            live = []
            for _ in range(2 if settings and settings.chunks == 3 else 0):
                _run(built, given, has_gradient)
                gc.collect()
                tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
                live.append((tensors, get_engine().stats()["host_bytes"]))
            return result, counter.gemm_flops, live

        stock, flops, _ = run_with(None)
        kept, _, _ = run_with(memo(0.5, 3, resident_layers=EVERYTHING))
        row = answer[name] = {"trained": len(stock.grads)}
        for ratio, chunks in ((0.0, 1), (1.0, 1), (0.5, 3)):
            got, ours, live = run_with(memo(ratio, chunks))
            row[f"{ratio} {chunks}"] = dict(
                differing=differing(stock if chunks == 1 else kept, got),
                flat=len(set(live)) <= 1,
                more_gemm_flops=ours - flops,
                moved=get_engine().stats()["d2h_bytes"],
            )
        # Of the first QKV projection and the adapter beside it (see HIDDEN, RANK).
        row["of the first input"] = 2 * TOKENS * HIDDEN * (3 * HIDDEN + RANK)
    return answer
