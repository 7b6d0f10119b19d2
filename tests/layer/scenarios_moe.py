"""What the worker processes do about layers with a mixture of experts (see scenarios)."""

import gc
from contextlib import contextmanager

import torch
from harness import (
    HEADS,
    HIDDEN,
    block_of,
    config,
    data,
    differing,
    fresh_engine,
    largest_error,
    run,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from scenarios import EVERYTHING, counted_and_told, memo, with_settings

from megatron_memo.config import Experts
from megatron_memo.layer.shape import ExpertShape, LayerShape
from megatron_memo.swap.engine import get_engine

TOKENS = 41  # a rank's
QUIET = dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)


def _config(**other):
    parallel = dict(
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    mixture = dict(
        layers=3,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=96,
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=1e-3,
    )
    return config("llama", **parallel, **(mixture | other))


def _block(cfg, settings):
    """Layers with experts, but the second, which is dense."""
    kinds = [None if i == 1 else cfg.num_moe_experts for i in range(cfg.num_layers)]
    specs = [
        get_gpt_layer_local_spec(num_experts=n, normalization=cfg.normalization) for n in kinds
    ]
    return block_of(specs, cfg, settings)


VARIANTS = {
    "allgather": dict(),
    "alltoall": dict(moe_token_dispatcher_type="alltoall"),
    "shared experts": dict(moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True),
    "capacity": dict(moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=0.5),
    "padded capacity": dict(
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
    ),
    "sequence loss": dict(moe_router_load_balancing_type="seq_aux_loss"),
    "global loss": dict(moe_router_load_balancing_type="global_aux_loss"),
    "sinkhorn": dict(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
    "expert bias": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
    ),
    "jitter": dict(moe_input_jitter_eps=0.1),
    "bf16": dict(dtype=torch.bfloat16),
    "dropout": dict(dropout=0.1),
}


def experts(variants=tuple(VARIANTS)):
    """By variant: what differs from stock in one chunk, and from kept experts in several."""
    answer = {}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for name in variants:
        cfg = _config(**VARIANTS[name])
        whole = name == "alltoall"  # every ratio and policy; the others once in one chunk and three
        given = data(cfg, TOKENS * tp, 2 if whole else 1)
        stock = run(_block(cfg, None), given)
        keeping = memo(0.5, 3, resident_layers=EVERYTHING)
        kept = run(_block(cfg, keeping), given)
        rows = {"several chunks' error": largest_error(stock.grads, kept.grads)}
        for ratio, chunks in ((0.0, 1), (1.0, 1), (0.5, 3)) if whole else ((0.0, 1), (0.5, 3)):
            for policy in Experts if whole else (Experts.RECOMPUTE,):
                built = _block(cfg, memo(ratio, chunks, moe_experts=policy))
                other = stock if chunks == 1 else kept
                rows[f"{ratio} {chunks} {policy.value}"] = differing(other, run(built, given))
        answer[name] = rows
    return answer


@contextmanager
def _experts_over_ranks():
    """Two tensor-parallel ranks that hold different experts."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)


def experts_over_ranks():
    """`experts` where tokens have to travel to the rank that has their expert."""
    with _experts_over_ranks():
        return experts(("allgather", "alltoall"))


def experts_memory():
    """By policy: bytes moved, live tensors and host bytes over iterations; routers' runs."""
    cfg = _config()
    given = data(cfg, TOKENS)
    answer = {}
    for policy in Experts:
        fresh_engine()
        built = _block(cfg, memo(0.0, 2, moe_experts=policy))
        routed = []
        for layer in built.layers:
            if layer.is_moe_layer:
                layer.mlp.router.register_forward_hook(lambda *_, seen=routed: seen.append(1))
        counts = []
        for _ in range(4):
            run(built, given)
            gc.collect()
            live = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            counts.append((live, get_engine().stats()["host_bytes"]))
        moved = get_engine().stats()["d2h_bytes"] / len(counts)
        # Of a graph that backward has been through: upstream's dispatchers keep their last scores.
        left = sum(
            isinstance(o, torch.Tensor) and o.grad_fn is not None and o.dim() == 3
            for o in gc.get_objects()
        )
        with torch.no_grad():
            with_settings(built.eval(), memo(0.0, 2, moe_experts=policy))
            before = get_engine().stats()["d2h_bytes"]
            built(hidden_states=given.inputs[0], attention_mask=None, rotary_pos_emb=given.rope)
        answer[policy.value] = dict(
            counts=counts, moved=moved, routed=len(routed), left=left,
            moved_in_evaluation=get_engine().stats()["d2h_bytes"] - before,
        )  # fmt: skip
    return answer


# Name -> of the config, of the shape.
FOOTPRINTS = {
    "losses": (dict(), dict(aux_loss=True, z_loss=True)),
    "allgather": (
        dict(moe_token_dispatcher_type="allgather"),
        dict(aux_loss=True, z_loss=True),
    ),
    "fused, shared": (
        dict(
            bias_activation_fusion=True,
            moe_shared_expert_intermediate_size=48,
            moe_shared_expert_gate=True,
            **QUIET,
        ),
        dict(shared_ffn=48, shared_gate=True),
    ),
    "many experts": (
        dict(num_moe_experts=16, moe_router_score_function="sigmoid", **QUIET),
        dict(count=16, local=16, whole_scores=True),
    ),
    "dropout": (dict(dropout=0.1, dtype=torch.bfloat16, **QUIET), dict()),
    "padded": (
        dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True, **QUIET),
        dict(capacity=1.0, padded=True),
    ),
}


def expert_footprints():
    """`scenarios.footprints` of layers with experts."""
    ranks, tp = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    shared_by = parallel_state.get_tensor_model_parallel_world_size()
    rows = []
    for name, (other, of_shape) in FOOTPRINTS.items():
        cfg = _config(**(dict(layers=1, moe_token_dispatcher_type="alltoall") | other))
        given = data(cfg, 97 * shared_by)
        experts = dict(count=4, topk=2, ffn=96 // tp, local=4, tp=tp) | of_shape
        experts["local"] //= ranks
        if "shared_ffn" in experts:
            experts["shared_ffn"] //= shared_by
        shape = LayerShape(
            tokens=97 * shared_by,
            shared_by=shared_by,
            hidden=HIDDEN,
            ffn=0,
            heads=HEADS // shared_by,
            groups=cfg.num_query_groups // shared_by,
            head_dim=HIDDEN // HEADS,
            itemsize=cfg.params_dtype.itemsize,
            rms_norm=True,
            rotary_dim=HIDDEN // HEADS,
            gated=True,
            fused_activation=cfg.bias_activation_fusion,
            dropout=cfg.hidden_dropout > 0,
            on_cuda=False,
            experts=ExpertShape(**experts),
        )
        spec = get_gpt_layer_local_spec(
            num_experts=cfg.num_moe_experts, normalization=cfg.normalization
        )
        built = block_of([spec], cfg, memo(0.5, 1))
        for policy in Experts:
            case = f"{name} {policy.value}"
            rows += counted_and_told(case, built, given, shape, moe_experts=policy)
    return rows


def expert_footprints_over_ranks():
    """The same where tokens have to travel."""
    with _experts_over_ranks():
        return expert_footprints()
