"""Causal flash attention on CUDA and CPU, saving q, k, v, the output and log-sum-exp, never s x s.

The kernels are PyTorch's own (`aten::_scaled_dot_product_*`), or the flash-attn package's on CUDA
where it is installed. Our autograd Function sits around the aten ones for two reasons: it saves
grouped k and v as they are (the expansion to all heads is redone in backward), and the output it
saves is the very tensor that the layer offloads, so that both share one host copy.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_memo.ops.context_parallel import HeadExchange, NoExchange
from megatron_memo.ops.packed import Bounds, PackedKernel
from megatron_memo.ops.target import kernels_for

HAVE_FLASH_ATTN = importlib.util.find_spec("flash_attn") is not None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    causal: bool = True,
    bounds: Bounds | None = None,
    exchange: HeadExchange | None = None,
) -> Tensor:
    """Softmax attention over the whole sequence.

    Args:
        query: [s, b, np, d]; s are this rank's tokens where there is an exchange.
        key: [s, b, ng, d]; ng divides np (grouped-query attention).
        value: [s, b, ng, dv], dv at most d (less in multi-latent attention).
        softmax_scale: factor on q k^T; 1/sqrt(d) if None.
        dropout_p: dropout of the attention weights; 0 on CPU, where no kernel has it.
        causal: token i attends to tokens 0..i only.
        bounds: where the sequences begin that the tokens are (see `ops.packed`); b is 1 then. None
            for one sequence.
        exchange: of context-parallel ranks that share the sequence. Tokens are traded for heads
            and back, in forward and again in backward: what is saved is this rank's own.

    Returns:
        [s, b, np*dv], contiguous.

    Raises:
        ValueError: dropout on CPU, np not a multiple of ng, values wider than keys, or heads that
            an exchange cannot share.
    """
    if value.size(3) > key.size(3):
        raise ValueError(
            f"--v-head-dim {value.size(3)}: is more than the {key.size(3)} of a key, which flash "
            "attention cannot have. Use --qk-head-dim and --qk-pos-emb-head-dim that add up to it."
        )
    if query.size(2) % key.size(2):
        raise ValueError(f"{query.size(2)} query heads cannot share {key.size(2)} key heads")
    if dropout_p and kernels_for(query) == "cpu":
        raise ValueError(
            f"--attention-dropout {dropout_p}: flash attention has no dropout on a machine without "
            "CUDA. Give --attention-dropout 0."
        )
    scale = 1.0 / math.sqrt(query.size(3)) if softmax_scale is None else softmax_scale
    half = query.dtype in (torch.float16, torch.bfloat16)
    plain = bounds is None and exchange is None
    if HAVE_FLASH_ATTN and query.is_cuda and half and plain:
        return _flash_attn_package(query, key, value, scale, dropout_p, causal)
    call = scale, dropout_p, causal
    return _AtenFlash.apply(query, key, value, call, bounds, exchange or NoExchange())


def forward_flops(tokens: int, batch: int, heads: int, head_dim: int, *, causal: bool) -> int:
    """FLOPs of one forward; half of s^2 where causal. Backward is 2.5 times this."""
    full = 4 * batch * heads * tokens * tokens * head_dim
    return full // 2 if causal else full


def _flash_attn_package(query, key, value, scale, dropout_p, causal):
    from flash_attn import flash_attn_func

    wide = _padded(value, query.size(3))
    q, k, v = (t.transpose(0, 1) for t in (query, key, wide))  # [b, s, n, d]
    out = flash_attn_func(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=causal)
    out = out[..., : value.size(3)]
    return out.transpose(0, 1).reshape(query.size(0), query.size(1), -1)


def _padded(t: Tensor, width: int) -> Tensor:
    """[..., dv] -> [..., width] with zeros: kernels want one width, and columns are independent."""
    return t if t.size(-1) == width else F.pad(t, (0, width - t.size(-1)))


class _AtenFlash(torch.autograd.Function):
    """aten flash attention, by device and dtype; see `flash_attention` for shapes.

    Values are padded to the width of keys for the kernel only: what is saved is as it came.
    """

    @staticmethod
    def forward(ctx, query, key, value, call, bounds, exchange):
        kernel = _kernel_for(query)
        if bounds is not None:
            kernel = PackedKernel(kernel, bounds)
        group = query.size(2) // key.size(2)
        q, k, v = (exchange.to_heads(t) for t in (query, key, value))
        v = _padded(v, q.size(3))
        out, extra = kernel.forward(_heads(q), _heads(k, group), _heads(v, group), *call)
        del q, k, v
        out = exchange.to_tokens(out.permute(2, 0, 1, 3)[..., : value.size(3)])
        out = out.reshape(query.size(0), query.size(1), -1).contiguous()
        ctx.save_for_backward(query, key, value, out, *extra)
        ctx.kernel, ctx.call, ctx.exchange = kernel, call, exchange
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, *extra = ctx.saved_tensors
        exchange, width = ctx.exchange, query.size(3)
        as_heads = (query.size(0), query.size(1), query.size(2), value.size(3))
        grad, q, k, v, out = (
            exchange.to_heads(t)
            for t in (grad_out.reshape(as_heads), query, key, value, out.view(as_heads))
        )
        narrow = v.size(3)
        del query, key, value, grad_out
        grads = ctx.kernel.backward(
            _heads(_padded(grad, width)),
            _heads(q),
            _heads(k, ctx.group),
            _heads(_padded(v, width), ctx.group),
            _heads(_padded(out, width)),
            extra,
            *ctx.call,
        )
        del grad, q, k, v, out, extra
        dq, dk, dv = (g.permute(2, 0, 1, 3) for g in grads)
        dk, dv = _sum_group(dk, ctx.group), _sum_group(dv[..., :narrow], ctx.group)
        dq, dk, dv = (exchange.to_tokens(g) for g in (dq, dk, dv))
        return dq, dk, dv, None, None, None


def _heads(t: Tensor, group: int = 1) -> Tensor:
    """[s, b, n, d] -> [b, n*group, s, d], each head repeated `group` times in place."""
    if group > 1:
        t = t.repeat_interleave(group, dim=2)
    return t.permute(1, 2, 0, 3)


def _sum_group(grad: Tensor, group: int) -> Tensor:
    """Gradient of the repetition: [s, b, n*group, d] -> [s, b, n, d]."""
    if group == 1:
        return grad
    s, b, n, d = grad.shape
    return grad.reshape(s, b, n // group, group, d).sum(dim=3)


class _CpuKernel:
    """aten::_scaled_dot_product_flash_attention_for_cpu: fp32, bf16, fp16."""

    @staticmethod
    def forward(q, k, v, scale, dropout_p, causal):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, causal, scale=scale
        )
        return out, (lse,)

    @staticmethod
    def backward(grad, q, k, v, out, extra, scale, dropout_p, causal):
        (lse,) = extra
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, dropout_p, causal, scale=scale
        )


class _CudaFlashKernel:
    """aten::_scaled_dot_product_flash_attention: fp16 and bf16."""

    @staticmethod
    def forward(q, k, v, scale, dropout_p, causal):
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, causal, False, scale=scale
        )
        return out, (lse, seed, offset)

    @staticmethod
    def backward(grad, q, k, v, out, extra, scale, dropout_p, causal):
        lse, seed, offset = extra
        # No nested tensors: cumulative lengths are None, longest lengths the sequence's.
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), dropout_p, causal,
            seed, offset, scale=scale,
        )  # fmt: skip


class _CudaEfficientKernel:
    """aten::_scaled_dot_product_efficient_attention: fp32 on CUDA, where flash has no kernel."""

    @staticmethod
    def forward(q, k, v, scale, dropout_p, causal):
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, dropout_p, causal, scale=scale
        )
        return out, (lse, seed, offset)

    @staticmethod
    def backward(grad, q, k, v, out, extra, scale, dropout_p, causal):
        lse, seed, offset = extra
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, seed, offset, dropout_p,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


def _kernel_for(t: Tensor):
    if kernels_for(t) == "cpu":
        return _CpuKernel
    return _CudaEfficientKernel if t.dtype == torch.float32 else _CudaFlashKernel
