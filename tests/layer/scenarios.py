"""What the worker processes do; the tests judge what they return."""

import dataclasses
import gc
import itertools
import os
import resource
import tempfile
import time
from contextlib import contextmanager

import adversary
import torch
from harness import (
    HEADS,
    HIDDEN,
    block,
    config,
    data,
    differing,
    fresh_engine,
    largest_error,
    run,
)
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_memo import phases
from megatron_memo.config import HostSettings, MemoConfig
from megatron_memo.layer.chunks import plan_chunks
from megatron_memo.layer.footprint import host_bytes, moved_bytes
from megatron_memo.layer.shape import LayerShape
from megatron_memo.profile.storage import StorageMeter
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine, get_engine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVERYTHING = 99  # resident layers: all
ODD_SEQUENCE = 97  # per rank

# (ratio, chunks) with one micro-batch and with several: every ratio with one, few and many chunks,
# every chunk count.
COMBINATIONS = (
    ((0.0, 5), (0.3, 3), (1.0, 2)),
    ((0.0, 1), (0.0, 4), (0.3, 1), (0.3, 2), (0.3, 5), (1.0, 1), (1.0, 3)),
)
# By ranks: micro-batches where there are several; models, all or each two values together.
SEVERAL = {1: 3, 2: 2}
MODELS = {
    1: tuple(itertools.product(("gpt", "llama"), DTYPES, (0.0, 0.1))),
    2: (("gpt", "fp32", 0.1), ("gpt", "bf16", 0.0), ("llama", "fp32", 0.0), ("llama", "bf16", 0.1)),
}


def memo(ratio, chunks, **other) -> MemoConfig:
    return MemoConfig(
        **(dict(swap_ratio=ratio, chunks=chunks, resident_layers=0, poison=True, min_swap_bytes=0)
           | other)
    )  # fmt: skip


def with_settings(built, settings):
    """The same block under other settings: a layer reads its settings at each forward."""
    for layer in built.layers:
        layer.memo = settings
    return built


def exactness():
    """Every combination against stock, and against the same chunks with everything kept."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = []
    for style, dtype, dropout in MODELS[tp]:
        cfg = config(style, layers=3, dtype=DTYPES[dtype], dropout=dropout)
        stock_block, built = block(cfg, None), block(cfg, memo(0.5, 1))
        exact_block = _in_fp32(style, stock_block) if dtype == "bf16" and not dropout else None
        for micro_batches, combinations in zip((1, SEVERAL[tp]), COMBINATIONS, strict=True):
            given = data(cfg, ODD_SEQUENCE * tp, micro_batches)
            stock, kept = run(stock_block, given), {}
            exact = run(exact_block, given.to(torch.float32)) if exact_block else None
            for ratio, chunks in combinations:
                settings = memo(ratio, chunks)
                got = run(with_settings(built, settings), given)
                # Kept layers run the same chunks and use nothing of the swap engine.
                cuts = tuple(
                    (c.start, c.stop) for c in plan_chunks(settings, ODD_SEQUENCE, tp, keep=True)
                )
                if cuts not in kept:
                    keeping = dataclasses.replace(settings, resident_layers=EVERYTHING)
                    kept[cuts] = run(with_settings(built, keeping), given)
                rows.append(
                    dict(
                        style=style, dtype=dtype, dropout=dropout, micro_batches=micro_batches,
                        ratio=ratio, chunks=chunks, cuts=len(cuts),
                        differs_from_kept=differing(kept[cuts], got),
                        differs_from_stock=differing(stock, got),
                        weight_grad_error=largest_error(stock.grads, got.grads),
                        # How much further from fp32's gradient than stock's, at worst.
                        further_from_fp32=exact and max(
                            largest_error([exact.grads[n]], [got.grads[n]])
                            - largest_error([exact.grads[n]], [stock.grads[n]])
                            for n in exact.grads
                        ),
                    )
                )  # fmt: skip
    return rows


def _in_fp32(style, original):
    """The same weights in fp32."""
    copy = block(config(style, layers=len(original.layers)), None)
    copy.load_state_dict(
        {k: v.float() for k, v in original.state_dict().items() if isinstance(v, torch.Tensor)},
        strict=False,
    )
    return copy


def batch_of_two():
    """b = 2: rows of [s, b, h] and the attention output's layout."""
    cfg = config("llama", layers=3)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    given = data(cfg, 64 * tp, 2, batch=2)
    stock = run(block(cfg, None), given)
    return {
        f"{ratio} {chunks}": differing(stock, run(block(cfg, memo(ratio, chunks)), given))
        for ratio, chunks in ((0.0, 1), (1.0, 1))
    } | {
        f"kept {ratio} {chunks}": differing(
            run(block(cfg, memo(ratio, chunks, resident_layers=EVERYTHING)), given),
            run(block(cfg, memo(ratio, chunks)), given),
        )
        for ratio, chunks in ((0.5, 2), (0.3, 5))
    }


def resident_layers():
    """The last N layers keep; the others swap; numbers do not change."""
    cfg = config("llama", layers=4)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    given = data(cfg, 64 * tp, 2)
    kept = run(block(cfg, memo(0.5, 3, resident_layers=EVERYTHING)), given)
    answer = {}
    for resident in (0, 1, 2, 3, 4):
        fresh_engine()
        got = run(block(cfg, memo(0.5, 3, resident_layers=resident)), given)
        answer[resident] = (differing(kept, got), get_engine().stats()["d2h_bytes"])
    return answer


def upstream_variants():
    """Variants of upstream's attention that the layer never heard of go through its own code."""
    answer = {}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for name, other in {
        "qk layernorm": dict(qk_layernorm=True),
        "fp32 residual": dict(fp32_residual_connection=True),
        "interleaved rope": dict(rotary_interleaved=True),
        "bias and swiglu": dict(add_bias_linear=True),
        "qkv bias": dict(add_qkv_bias=True),
        # Upstream's own autograd functions for these pairs, which are compiled where a GPU is.
        "fused activation and dropout": dict(bias_activation_fusion=True, bias_dropout_fusion=True),
    }.items():
        cfg = config("llama", layers=2, **other)
        given = data(cfg, 64 * tp)
        if cfg.fp32_residual_connection:
            given.inputs = [t.float() for t in given.inputs]
        stock = run(block(cfg, None), given)
        answer[name] = [
            differing(stock, run(block(cfg, memo(ratio, 1)), given)) for ratio in (0.0, 1.0)
        ]
    return answer


class Counter(TorchDispatchMode):
    """GEMM FLOPs and attention calls, forward and backward."""

    def __init__(self):
        super().__init__()
        self.gemm_flops = 0
        self.attention_forwards = 0
        self.attention_backwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "bmm", "addmm"):
            a, b = args[-2:] if name == "addmm" else args[:2]
            self.gemm_flops += 2 * a.numel() * b.shape[-1]
        self.attention_forwards += name == "_scaled_dot_product_flash_attention_for_cpu"
        self.attention_backwards += name == "_scaled_dot_product_flash_attention_for_cpu_backward"
        return func(*args, **(kwargs or {}))


def flops():
    """What recompute adds to the GEMMs of a run that keeps everything, and attention's calls."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = []
    for style, dropout in (("gpt", 0.1), ("llama", 0.0)):
        layers, sequence = 3, 100 * tp
        cfg = config(style, layers=layers, dropout=dropout)
        given = data(cfg, sequence)
        built = block(cfg, None)
        # Forward GEMM FLOPs a token and rank: weights' sizes tell (2 a weight element).
        first = built.layers[0]
        redone = sum(
            2 * module.weight.numel()
            for module in (
                first.self_attention.linear_qkv, first.self_attention.linear_proj,
                first.mlp.linear_fc1,
            )
        )  # fmt: skip
        for ratio, chunks in itertools.product((0.0, 0.25, 0.6, 1.0), (1, 4)):
            counts = []
            for resident in (EVERYTHING, 0):
                settings = memo(ratio, chunks, resident_layers=resident)
                with Counter() as counter:
                    run(block(cfg, settings), given)
                counts.append(counter)
            kept, got = counts
            rows.append(
                dict(
                    style=style, dropout=dropout, ratio=ratio, chunks=chunks, layers=layers,
                    sequence=sequence, redone_flops_per_token=redone,
                    extra_flops=got.gemm_flops - kept.gemm_flops,
                    attention_forwards=got.attention_forwards,
                    attention_backwards=got.attention_backwards,
                )
            )  # fmt: skip
    return rows


def peaks():
    """Peak bytes of live activations, 8 layers, one micro-batch."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    sequence = 1024 * tp
    answer = {}
    for style in ("gpt", "llama"):
        full = dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        cases = {"stock": (config(style, layers=8), None)}
        cases["full recompute"] = (config(style, layers=8, **full), None)
        for ratio, chunks, depth in (
            *((1.0, 1, "layers"), (1.0, 4, "layers"), (0.0, 4, "auto")),
            *((1.0, 8, "auto"), (1.0, 8, 4), (0.0, 8, 4)),
        ):
            settings = memo(ratio, chunks, poison=False, min_swap_bytes=4096, prefetch_depth=depth)
            cases[f"memo {ratio} {chunks} {depth}"] = (config(style, layers=8), settings)
        answer[style] = {name: _peak(*case, sequence) for name, case in cases.items()}
        two = config(style, layers=2)
        # What two layers save when everything is kept: live after forward, less the output.
        saved = _peak(two, None, sequence, after_forward=True)
        answer[style]["two layers' skeletals"] = saved
    return answer


def _peak(cfg, settings, sequence, after_forward=False):
    built, given = block(cfg, settings), data(cfg, sequence)
    run(built, given)  # lazy buffers, and .grad
    x = given.inputs[0].clone().requires_grad_()
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with StorageMeter(ignore=[x]) as meter:
        y = built(hidden_states=x, attention_mask=None, rotary_pos_emb=given.rope)
        live = meter.live_bytes
        y.backward(given.output_grads[0])
    return live if after_forward else meter.peak_bytes


def leaks():
    """Live tensors, host bytes over iterations, with passes that end in odd ways in between."""
    cfg = config("llama", layers=3)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    given = data(cfg, 64 * tp, 2)
    built = block(cfg, memo(0.5, 3))
    reference = run(built, given)
    counts = []

    def live():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    def forward_only():
        built(hidden_states=given.inputs[0].clone().requires_grad_(), attention_mask=None,
              rotary_pos_emb=given.rope)  # fmt: skip

    def evaluation():
        built.eval()
        with torch.no_grad():
            forward_only()
        built.train()

    def failure():
        def boom(*_):
            raise ArithmeticError

        for broken in (built.layers[1].mlp, built.layers[2].self_attention.linear_proj):
            handle = broken.register_forward_pre_hook(boom)
            try:
                forward_only()
            except ArithmeticError:
                pass
            else:
                raise AssertionError("the hook did not fire")
            finally:
                handle.remove()

    def failure_in_backward():
        def boom(*_):
            raise ArithmeticError

        for broken in (built.layers[2].mlp, built.layers[1].self_attention.core_attention):
            handle = broken.register_full_backward_pre_hook(boom)
            x = given.inputs[0].clone().requires_grad_()
            y = built(hidden_states=x, attention_mask=None, rotary_pos_emb=given.rope)
            try:
                y.backward(given.output_grads[0])
            except ArithmeticError:
                pass
            else:
                raise AssertionError("the hook did not fire")
            finally:
                handle.remove()

    answer = {}
    for name, between in {
        "nothing": lambda: None,
        "forward only": forward_only,
        "evaluation": evaluation,
        "failure": failure,
        "failure in backward": failure_in_backward,
        "other depth": lambda: run(
            with_settings(built, memo(0.5, 3, prefetch_depth="layers")), given
        ),
    }.items():
        counts = []
        for _ in range(5):
            between()
            got = run(with_settings(built, memo(0.5, 3, prefetch_depth=2)), given)
            same = not differing(reference, got)
            del got
            counts.append((live(), get_engine().stats()["host_bytes"], same))
        answer[name] = counts
    return answer


def many_iterations():
    """What a small block holds after its iterations: live tensors, host bytes, resident bytes."""
    cfg = config("llama", layers=2)
    given = data(cfg, 64)
    built = block(cfg, memo(0.5, 3, prefetch_depth=2))
    held = []
    gc.collect()
    gc.disable()  # cycles of ours would pile up
    try:
        for iteration in range(200):
            run(built, given)
            if iteration % 20 == 19:
                tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
                held.append((tensors, get_engine().stats()["host_bytes"], _resident_bytes()))
    finally:
        gc.enable()
    return held


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def evaluation():
    """Without gradients: same numbers as stock, nothing swapped, nothing saved."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    cfg = config("llama", layers=3, dropout=0.1)
    given = data(cfg, 64 * tp)
    stock, ours = block(cfg, None).eval(), block(cfg, memo(0.5, 1)).eval()
    chunked = block(cfg, memo(0.5, 4)).eval()
    fresh_engine()
    outputs = []
    for built in (stock, ours, chunked):
        with torch.no_grad():
            outputs.append(
                built(hidden_states=given.inputs[0], attention_mask=None, rotary_pos_emb=given.rope)
            )
    return dict(
        one_chunk_bitwise=torch.equal(outputs[0], outputs[1]),
        chunked_error=largest_error(outputs[:1], outputs[2:]),
        d2h_bytes=get_engine(MemoConfig(0.5, poison=True)).stats()["d2h_bytes"],
    )


def inputs_that_die_early():
    """Masks that the caller drops before backward, in sizes whose memory is soon used again."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    answer = {}
    for layers in (1, 3):
        cfg = config("llama", layers=layers)
        given = data(cfg, 64 * tp)
        built = block(cfg, memo(0.5, 3))
        kept = run(with_settings(built, memo(0.5, 3, resident_layers=EVERYTHING)), given)
        with_settings(built, memo(0.5, 3))
        for numel in (64, 64 * 16, 64 * 32, 64 * 64, 64 * 160, 64 * 320):
            x = given.inputs[0].clone().requires_grad_()
            for parameter in built.parameters():
                parameter.grad = None
            mask = torch.ones(numel)  # 4 bytes an element, as activations
            y = built(hidden_states=x, attention_mask=mask, rotary_pos_emb=given.rope)
            del mask
            y.backward(given.output_grads[0])
            same = torch.equal(x.grad, kept.input_grads[0])
            answer[f"{layers} {numel}"] = same and all(
                torch.equal(p.grad, kept.grads[n]) for n, p in built.named_parameters()
            )
    return answer


def changes_after_forward():
    """What is said when something that backward needs is changed in place after forward."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    cfg = config("llama", layers=1)  # not retired: backward reads the forward's own tensors
    given = data(cfg, 64 * tp)
    answer = {}
    for ratio in (0.0, 0.5, 1.0):
        for what in ("weight", "input"):
            built = block(cfg, memo(ratio, 2))
            x = given.inputs[0].clone().requires_grad_()
            entered = x * 1
            y = built(hidden_states=entered, attention_mask=None, rotary_pos_emb=given.rope)
            with torch.no_grad():
                (entered if what == "input" else built.layers[0].mlp.linear_fc1.weight).add_(1)
            try:
                y.backward(given.output_grads[0])
                answer[f"{what} {ratio}"] = "nothing"
            except RuntimeError as error:
                answer[f"{what} {ratio}"] = str(error)
    return answer


@contextmanager
def fused_wgrad():
    """A stand-in for the CUDA extension behind --gradient-accumulation-fusion, in plain torch.

    With it, upstream's linear layers add weight gradients into `main_grad` inside their backward,
    also through saved-tensor hooks: the path that Transformer-Engine-less GPU runs take.
    """
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import layers

    def accumulate(total_input, grad_output, main_grad):
        main_grad.add_(grad_output.t().to(main_grad.dtype) @ total_input.to(main_grad.dtype))

    before = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
    available = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available
        if before is None:
            del layers.fused_weight_gradient_mlp_cuda
        else:
            layers.fused_weight_gradient_mlp_cuda = before


def _against_stock(dtype, main_grads):
    """What `main_grads(settings)` gives for memo, against stock's (None)."""
    stock, answer = main_grads(None), {}
    for ratio, chunks in ((0.0, 1), (1.0, 1), (0.5, 4)):
        got = main_grads(memo(ratio, chunks))
        answer[f"{dtype} {ratio} {chunks}"] = dict(
            bitwise=all(torch.equal(stock[n], got[n]) for n in stock),
            nonzero=all(bool(t.abs().sum() > 0) for t in got.values()),
            error=largest_error(stock, got),
        )
    return answer


def gradient_accumulation_fusion():
    """main_grad with the fused weight gradient: stock against memo."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    answer = {}
    with fused_wgrad():
        for dtype in DTYPES:
            cfg = config("llama", layers=3, dtype=DTYPES[dtype], gradient_accumulation_fusion=True)
            given = data(cfg, 64 * tp, 2)

            def main_grads(settings, cfg=cfg, given=given):
                built = block(cfg, settings)
                for parameter in built.parameters():
                    parameter.main_grad = torch.zeros(parameter.shape)
                    parameter.grad_added_to_main_grad = False
                run(built, given)
                return {n: p.main_grad for n, p in built.named_parameters() if "linear" in n}

            answer |= _against_stock(dtype, main_grads)
    return answer


def fusion_under_ddp():
    """main_grad after Megatron's DDP with overlap: it wants a gradient of every parameter, once."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    overlap = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    answer = {}
    with fused_wgrad():
        for dtype in DTYPES:
            cfg = config("llama", layers=3, dtype=DTYPES[dtype], gradient_accumulation_fusion=True)
            given = data(cfg, 64 * tp)

            def main_grads(settings, cfg=cfg, given=given):
                built = block(cfg, settings)
                ddp = DistributedDataParallel(cfg, overlap, built)
                run(built, given)
                ddp.finish_grad_sync()
                return {n: p.main_grad.clone() for n, p in built.named_parameters()}

            answer |= _against_stock(dtype, main_grads)
    return answer


# Style, what differs from the harness's layer, and micro-batch size.
FOOTPRINT_LAYERS = (
    ("gpt", dict(dropout=0.1), 1),
    ("gpt", dict(dtype=torch.bfloat16, dropout=0.1), 2),
    ("gpt", dict(bias_activation_fusion=True, bias_dropout_fusion=True), 1),
    ("gpt", dict(sequence_parallel=False), 1),
    ("gpt", dict(qk_layernorm=True), 1),
    ("llama", dict(), 2),
    ("llama", dict(dropout=0.1, bias_activation_fusion=True), 1),
    ("llama", dict(dtype=torch.bfloat16, dropout=0.1), 1),
    ("llama", dict(sequence_parallel=False), 1),
    ("llama", dict(qk_layernorm=True), 1),
    ("llama", dict(qk_layernorm=True, num_query_groups=HEADS), 1),
    ("llama", dict(qk_layernorm=True, dtype=torch.bfloat16), 1),
)


def footprints():
    """Bytes moved and held as the engine counted them, and as the model's shape tells."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = []
    for style, other, batch in FOOTPRINT_LAYERS:
        cfg = config(style, layers=1, **other)
        shared_by = tp if cfg.sequence_parallel else 1
        tokens = ODD_SEQUENCE * shared_by
        given = data(cfg, ODD_SEQUENCE * tp, batch=batch)
        given.rope = None if given.rope is None else given.rope[:tokens]
        llama = style == "llama"
        shape = LayerShape(
            tokens=tokens,
            shared_by=shared_by,
            batch=batch,
            hidden=HIDDEN,
            ffn=cfg.ffn_hidden_size // tp,
            heads=HEADS // tp,
            groups=cfg.num_query_groups // tp,
            head_dim=HIDDEN // HEADS,
            itemsize=cfg.params_dtype.itemsize,
            rms_norm=llama,
            qk_norm=cfg.qk_layernorm,
            rotary_dim=HIDDEN // HEADS if llama else 0,
            gated=llama,
            fused_activation=cfg.bias_activation_fusion,
            dropout=cfg.hidden_dropout > 0,
            on_cuda=False,
        )
        built = block(cfg, memo(0.5, 1))
        rows += counted_and_told(f"{style} {other}", built, given, shape)
    return rows


def counted_and_told(name, built, given, shape, **other):
    """A row for each of several settings: the engine's bytes, and those of the layer's shape."""
    rows = []
    for ratio, chunks, smallest in ((0.0, 2, 0), (0.4, 4, 2000), (1.0, 1, 0), (1.0, 3, 2000)):
        settings = memo(ratio, chunks, min_swap_bytes=smallest, **other)
        fresh_engine()
        run(with_settings(built, settings), given)
        stats = get_engine().stats()
        rows.append(
            dict(
                case=f"{name} {settings}",
                counted=[stats["d2h_bytes"], stats["host_bytes"]],
                told=[moved_bytes(shape, settings), host_bytes(shape, settings)],
            )
        )
    return rows


def state_dicts():
    """Names, shapes and sharding of what a checkpoint holds."""
    cfg = config("llama", layers=2)
    stock, ours = block(cfg, None), block(cfg, memo(0.5, 2))

    def describe(built):
        plain = {k: None if v is None else list(v.shape) for k, v in built.state_dict().items()
                 if not k.endswith("_extra_state")}  # fmt: skip
        sharded = {
            k: (v.key, list(getattr(v, "global_shape", ())), list(getattr(v, "global_offset", ())))
            for k, v in built.sharded_state_dict().items()
        }
        return plain, sharded

    loaded = ours.load_state_dict(stock.state_dict())
    return dict(same=describe(stock) == describe(ours), missing=list(loaded.missing_keys),
                unexpected=list(loaded.unexpected_keys), hidden=HIDDEN)  # fmt: skip


# The mutation check: each wait of the protocol (see swap.engine), taken out alone. The fifth has no
# effect on a whole layer, which reads all it fetches; tests/swap/test_context.py has it.
WAITS = {
    "d2h_after_compute": lambda self: None,
    "retire_after_d2h": lambda self, event: None,
    "buffer_is_free": lambda self: None,
    "read_after_h2d": lambda self, event: None,
}


def protocol_mutations():
    """Per schedule: what differs with the protocol whole, and with each wait removed."""
    cfg = config("llama", layers=4)
    given = data(cfg, 96, 2)
    built = block(cfg, memo(0.5, 3))
    kept = run(with_settings(built, memo(0.5, 3, resident_layers=EVERYTHING)), given)
    with_settings(built, memo(0.5, 3))
    answer = {}
    for schedule in (adversary.Late, adversary.Early):
        results = {}
        for name in (None, *WAITS):
            fresh_engine(SwapEngine(schedule(), poison=True))
            original = getattr(SwapEngine, name) if name else None
            if name:
                setattr(SwapEngine, name, WAITS[name])
            try:
                results[name or "whole"] = differing(kept, run(built, given))
                assert isinstance(get_engine().backend, schedule)
            finally:
                if name:
                    setattr(SwapEngine, name, original)
        answer[schedule.__name__] = results
    return answer


def on_disk():
    """A part or all of what is swapped goes through files: the same numbers, pass after pass."""
    cfg = config("llama", layers=3, dropout=0.1)
    given = data(cfg, 512, 2)
    built = block(cfg, memo(0.5, 3))
    fresh_engine()
    in_memory, need = run(built, given), int(get_engine().stats()["host_bytes"])
    answer = {}
    for part in (0.3, 1.0):
        with tempfile.TemporaryDirectory() as folder:
            host = HostSettings(
                budget=int(need * (1 - part)) + (1 << 16),
                nvme_path=folder,
                nvme_budget=4 * need,
                need=need,
                spill=int(part * need),
            )
            engine = SwapEngine(HostThreadBackend(), poison=True, host=host)
            fresh_engine(engine)
            differs = [differing(in_memory, run(built, given)) for _ in range(2)]
            stats = engine.stats()
            answer[part] = dict(
                differs=differs,
                need=need,
                budget=host.budget,
                host_bytes=stats["host_bytes"],
                disk_bytes=stats["disk_bytes"],
                names_left=os.listdir(folder),
            )
    return answer


def forced_delays():
    """Slow and late copies, and compute that is slow itself: the same numbers, from iteration 0."""
    cfg = config("gpt", layers=4, dropout=0.1)
    given = data(cfg, 96, 2)
    built = block(cfg, memo(0.5, 3))
    kept = run(with_settings(built, memo(0.5, 3, resident_layers=EVERYTHING)), given)
    with_settings(built, memo(0.5, 3))
    slow = 0.004
    answer = {}
    for name, backend in {
        "slow D2H": adversary.Delayed(d2h_seconds=slow),
        "slow H2D": adversary.Delayed(h2d_seconds=slow),
        "both slow": adversary.Delayed(d2h_seconds=slow, h2d_seconds=slow, seed=1),
        "late": adversary.Late(),
        "early": adversary.Early(),
        "sync": None,
    }.items():
        engine = SwapEngine(backend or HostThreadBackend(), sync=backend is None, poison=True)
        fresh_engine(engine)
        answer[name] = [differing(kept, run(built, given)) for _ in range(2)]
        assert get_engine() is engine
    hooks = [layer.mlp.register_forward_hook(lambda *_: time.sleep(slow)) for layer in built.layers]
    fresh_engine(SwapEngine(HostThreadBackend(), poison=True))
    answer["slow compute"] = [differing(kept, run(built, given)) for _ in range(2)]
    for hook in hooks:
        hook.remove()
    engine = SwapEngine(adversary.Delayed(h2d_seconds=slow), poison=True)
    fresh_engine(engine)
    run(built, given)
    answer["exposed_h2d_s"] = engine.stats()["exposed_h2d_s"]
    return answer


def depths():
    """Every depth under the worst schedules and a random one: what differs."""
    cfg = config("llama", layers=4)
    given = data(cfg, 96, 2)
    built = block(cfg, memo(0.5, 3))
    answer = {}
    for ratio in (0.5, 1.0):
        kept = run(with_settings(built, memo(ratio, 3, resident_layers=EVERYTHING)), given)
        for depth in (1, 3, "layers"):
            with_settings(built, memo(ratio, 3, prefetch_depth=depth))
            for backend in (
                adversary.Late(),
                adversary.Early(),
                adversary.Delayed(d2h_seconds=0.0005, h2d_seconds=0.0005),
            ):
                fresh_engine(SwapEngine(backend, poison=True))
                name = f"{type(backend).__name__} {ratio} {depth}"
                got = [run(built, given, in_flight=in_flight) for in_flight in (False, True)]
                answer[name] = [differing(kept, one) for one in got]
                assert not get_engine()._in_flight
    return answer


def markers():
    """The phases that two layers of two and three chunks enter, in evaluation and in training."""
    cfg = config("llama", layers=2)
    built = block(cfg, memo(0.5, 2))
    built.layers[1].memo = memo(0.5, 3)
    given = data(cfg, 60)
    heard = []
    phases.begin_iteration()
    with phases.listening(lambda phase: heard.append(str(phase))), torch.no_grad():
        built(hidden_states=given.inputs[0], attention_mask=None, rotary_pos_emb=given.rope)
    in_evaluation, heard[:] = list(heard), []
    with phases.listening(lambda phase: heard.append(str(phase))):
        run(built, given)
    return {"evaluation": in_evaluation, "training": heard}
