"""A block of layers, stock or memo, run on the same data; results compared."""

from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_memo import platform

if not torch.cuda.is_available():
    platform.activate()

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_memo.config import MemoConfig
from megatron_memo.layer.spec import memo_spec
from megatron_memo.ops.norm import norm
from megatron_memo.swap.engine import set_engine

HIDDEN, HEADS = 64, 4


def config(
    style: str, *, layers=4, dtype=torch.float32, dropout=0.0, cls=TransformerConfig, **other
) -> TransformerConfig:
    """`gpt` (LayerNorm, GELU, biases) or `llama` (RMSNorm, SwiGLU, grouped queries, no biases)."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    common = dict(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    if style == "gpt":
        common |= dict(ffn_hidden_size=4 * HIDDEN, normalization="LayerNorm", add_bias_linear=True)
    else:
        common |= dict(
            ffn_hidden_size=160,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            num_query_groups=2,
        )
    return cls(**(common | other))


def block(cfg: TransformerConfig, memo: MemoConfig | None, seed: int = 7) -> TransformerBlock:
    """Layers of `cfg`, upstream's over our modules (memo None) or memo's; same weights by seed."""
    layer = get_gpt_layer_local_spec(normalization=cfg.normalization, qk_layernorm=cfg.qk_layernorm)
    return block_of([layer] * cfg.num_layers, cfg, memo, seed)


def block_of(
    layers: list[ModuleSpec], cfg: TransformerConfig, memo: MemoConfig | None, seed: int = 7
) -> TransformerBlock:
    """`block` of the given upstream layers."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    built = TransformerBlock(
        cfg,
        TransformerBlockSubmodules(
            layer_specs=[memo_spec(layer, cfg, memo) for layer in layers], layer_norm=norm
        ),
        post_layer_norm=False,
    ).train()
    torch.manual_seed(99)
    for parameter in built.parameters():
        if parameter.dim() == 1:  # norms and biases away from their 1s and 0s
            parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    return built


@dataclass
class Result:
    outputs: list[torch.Tensor]
    input_grads: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


@dataclass
class Data:
    inputs: list[torch.Tensor]
    output_grads: list[torch.Tensor]
    rope: torch.Tensor | None
    packed: PackedSeqParams | None = None

    def to(self, dtype: torch.dtype) -> "Data":
        return Data(
            [t.to(dtype) for t in self.inputs], [t.to(dtype) for t in self.output_grads], self.rope
        )


def data(cfg: TransformerConfig, sequence: int, micro_batches: int = 1, batch: int = 1) -> Data:
    """This rank's rows of random inputs and output gradients."""
    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    torch.manual_seed(1)
    full = [
        torch.randn(sequence, batch, HIDDEN).to(cfg.params_dtype) for _ in range(2 * micro_batches)
    ]
    local = [t.chunk(tp, 0)[rank].contiguous() for t in full]
    rope = None
    if cfg.normalization == "RMSNorm":
        rope = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True)(sequence)
    return Data(local[:micro_batches], local[micro_batches:], rope)


def run(built: TransformerBlock, given: Data, seed: int = 5, *, in_flight: bool = False) -> Result:
    """Forward and backward of every micro-batch in turn, from the same random state; or, as in a
    pipeline's first stage, forward of every one and then backward of every one."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    for parameter in built.parameters():
        parameter.grad = None
    outputs, inputs, waiting = [], [], deque()
    for values, grad in zip(given.inputs, given.output_grads, strict=True):
        x = values.clone().requires_grad_()
        y = built(
            hidden_states=x,
            attention_mask=None,
            rotary_pos_emb=given.rope,
            packed_seq_params=given.packed,
        )
        outputs.append(y.detach().clone())
        inputs.append(x)
        waiting.append((y, grad))
        del y
        while waiting and (not in_flight or len(inputs) == len(given.inputs)):
            output, output_grad = waiting.popleft()
            output.backward(output_grad)
            del output
    input_grads = [x.grad for x in inputs]
    return Result(outputs, input_grads, {n: p.grad for n, p in built.named_parameters()})


def fresh_engine(engine=None) -> None:
    """Lets go of the process's swap engine; the next layer makes a new one, or uses `engine`."""
    set_engine(engine)


def differing(a: Result, b: Result) -> list[str]:
    """Names of what is not bitwise equal."""
    assert a.grads.keys() == b.grads.keys()
    pairs = {f"output {i}": p for i, p in enumerate(zip(a.outputs, b.outputs, strict=True))}
    pairs |= {
        f"input grad {i}": p for i, p in enumerate(zip(a.input_grads, b.input_grads, strict=True))
    }
    pairs |= {n: (a.grads[n], b.grads[n]) for n in a.grads}
    return [name for name, (s, t) in pairs.items() if not torch.equal(s, t)]


def largest_error(a, b) -> float:
    """Largest relative error (Frobenius norm) over corresponding tensors of two lists or dicts."""
    pairs = [(a[n], b[n]) for n in a] if isinstance(a, dict) else zip(a, b, strict=True)
    return max(
        float((s.double() - t.double()).norm() / s.double().norm().clamp_min(1e-30))
        for s, t in pairs
    )
