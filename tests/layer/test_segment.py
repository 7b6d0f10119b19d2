"""One piece of a layer on one chunk: what it keeps, drops, moves and gives back."""

import pytest
import torch
from torch import nn

from megatron_memo.layer.chunks import Fate
from megatron_memo.layer.rows import Rows, Source, Target, on_backward
from megatron_memo.layer.segment import Base, Segment
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine


class TwoLinears(nn.Module):
    """fc1, gelu, fc2 in upstream's MLP form: linear layers return (output, bias)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = WithBias(8, 32), WithBias(32, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden, bias = self.fc1(x)
        out, out_bias = self.fc2(torch.nn.functional.gelu(hidden + bias))
        return (x + out + out_bias,)


class WithBias(nn.Linear):
    ran = 0

    def forward(self, x):
        self.ran += 1
        return x @ self.weight.t(), self.bias


@pytest.fixture
def context():
    engine = SwapEngine(HostThreadBackend(), poison=True)
    return engine.begin_layer(first=True, swaps=True, device=torch.device("cpu")).own


def segment_of(module, x, fate, context, *, skip=True):
    handle = context.put(x.detach())
    return Segment(
        module,
        bases=[Base(x.detach(), lambda: context.get(handle))],
        fate=fate,
        context=context,
        fixed=frozenset(p.untyped_storage().data_ptr() for p in module.parameters()),
        min_swap_bytes=0,
        last_gemm=(module, "fc2") if skip else None,
    )


def gradients(module, x, out):
    return torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("fate", list(Fate))
@pytest.mark.parametrize("retired", [True, False])
def test_gradients_are_those_without_hooks_bitwise(context, fate, retired, skip):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)
    expected = gradients(module, x, module(x)[0])
    (out,) = segment_of(module, x, fate, context, skip=skip).run(x)
    context.flush()
    if retired:
        context.retire()
    assert all(map(torch.equal, gradients(module, x, out), expected))


@pytest.mark.parametrize(("skip", "runs"), [(True, 1), (False, 2)])
def test_the_last_gemm_is_not_run_again(context, skip, runs):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)
    (out,) = segment_of(module, x, Fate.RECOMPUTE, context, skip=skip).run(x)
    context.flush()
    gradients(module, x, out)
    assert (module.calls, module.fc1.ran, module.fc2.ran) == (2, 2, runs)


def test_a_recomputed_chunk_keeps_nothing_of_its_own(context):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)
    saved = []
    segment = segment_of(module, x, Fate.RECOMPUTE, context)
    pack = segment._pack_dropped
    segment._pack_dropped = lambda t: saved.append(pack(t)) or saved[-1]
    segment.run(x)
    kept = [s for s in saved if isinstance(s, torch.Tensor)]
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert saved
    assert {t.untyped_storage().data_ptr() for t in kept} <= parameters


@pytest.mark.parametrize("fate", [Fate.SWAP, Fate.RECOMPUTE])
def test_a_second_backward_is_refused(context, fate):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)
    (out,) = segment_of(module, x, fate, context).run(x)
    context.flush()
    loss = out.square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    context.release()
    with pytest.raises(RuntimeError, match="run only once"):
        torch.autograd.grad(loss, x)


def test_a_function_that_does_not_compute_the_same_twice_is_caught(context):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)

    def moody(t):
        (out,) = module(t)
        return (out if module.calls > 1 else out.exp(),)

    segment = Segment(
        moody,
        bases=[Base(x.detach(), lambda: x.detach())],
        fate=Fate.RECOMPUTE,
        context=context,
        fixed=frozenset(),
        min_swap_bytes=0,
    )
    (out,) = segment.run(x)
    with pytest.raises(RuntimeError, match="does not compute the same twice"):
        out.sum().backward()


def test_autocast_is_as_it_was_when_a_chunk_is_recomputed(context):
    module, x = TwoLinears(), torch.randn(5, 8, requires_grad=True)
    dtypes = []

    def spying(t):
        out = module(t)
        dtypes.append((module.fc1(t)[0].dtype, torch.is_autocast_enabled("cpu")))
        return out

    segment = Segment(
        spying,
        bases=[Base(x.detach(), lambda: x.detach())],
        fate=Fate.RECOMPUTE,
        context=context,
        fixed=frozenset(),
        min_swap_bytes=0,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = segment.run(x)
    out.sum().backward()  # outside of autocast
    assert dtypes == [(torch.bfloat16, True)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_taking_rows_and_putting_them_back_is_the_identity(ranks):
    n, width = 6, 3
    whole = torch.randn(ranks * n, width, requires_grad=True)
    source, target = Source(whole), Target()
    anchor, tokens = source.anchor(whole), []
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        rows = Rows(ranks, n, start, stop)
        part = source.take(anchor, rows, rows.take(whole.detach()))
        tokens.append(target.put(rows, 2 * part))
    joined = target.join(tokens)
    grad = torch.randn_like(joined)
    joined.backward(grad)
    assert torch.equal(joined, 2 * whole)
    assert torch.equal(whole.grad, 2 * grad)


def test_calls_are_made_when_a_gradient_arrives_and_when_it_is_complete():
    order = []
    x = torch.randn(4, 2, requires_grad=True)
    source = Source(x, on_complete=lambda: order.append("complete"))
    anchor = source.anchor(x)
    parts = [
        source.take(anchor, rows, rows.take(x.detach()))
        for rows in (Rows(1, 4, 0, 1), Rows(1, 4, 1, 4))
    ]
    y = on_backward(torch.cat(parts), lambda: order.append("arrived"))
    assert order == []
    y.sum().backward()
    assert order == ["arrived", "complete"]


def test_compiled_pieces_are_swapped_and_recomputed_like_any_other(monkeypatch):
    """As Megatron's fused functions are where there is a GPU. The CPU platform turns compiling off,
    so it is turned on here; the backend needs no C++ compiler."""
    import torch._dynamo as dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with dynamo.config.patch(disable=False):
        dynamo.utils.counters.clear()
        compiled = dynamo.optimize("aot_eager")(
            lambda t, factor: torch.nn.functional.gelu(t + 1) * factor
        )

        class Compiled(TwoLinears):
            def forward(self, x):
                hidden, bias = self.fc1(x)
                out, out_bias = self.fc2(compiled(hidden + bias, bias))
                return (x + out + out_bias,)

        module, x = Compiled(), torch.randn(5, 8, requires_grad=True)
        expected = gradients(module, x, module(x)[0])
        for fate in (Fate.SWAP, Fate.RECOMPUTE):
            engine = SwapEngine(HostThreadBackend(), poison=True)
            context = engine.begin_layer(first=True, swaps=True, device=x.device).own
            (out,) = segment_of(module, x, fate, context).run(x)
            context.flush()
            context.retire()
            assert all(map(torch.equal, gradients(module, x, out), expected)), fate
        assert dynamo.utils.counters["stats"]["unique_graphs"] >= 1
