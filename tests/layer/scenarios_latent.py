"""What the worker processes do about multi-latent attention (see scenarios)."""

import torch
from harness import HEADS, HIDDEN, block_of, config, data, differing, largest_error, run
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from scenarios import EVERYTHING, counted_and_told, memo

from megatron_memo.layer.shape import LatentShape, LayerShape

TOKENS = 41  # a rank's
VARIANTS = {
    "rope, whole queries": dict(rope_type="rope", q_lora_rank=None),
    "yarn, latent queries": dict(rope_type="yarn", q_lora_rank=24, qk_layernorm=True),
}


def _config(layers=3, **other):
    return config(
        "llama", layers=layers, cls=MLATransformerConfig, multi_latent_attention=True,
        num_query_groups=4, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=16, **other,
    )  # fmt: skip


def _layer(cfg):
    return get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=cfg.qk_layernorm, normalization=cfg.normalization
    )


def latent_attention():
    """By variant: what differs from stock in one chunk, and from kept chunks in several."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    answer = {}
    for name, other in VARIANTS.items():
        cfg = _config(**other)
        layer = _layer(cfg)
        given = data(cfg, TOKENS * tp, 2)
        given.rope = None  # it has its own

        def got(settings, cfg=cfg, layer=layer, given=given):
            return run(block_of([layer] * cfg.num_layers, cfg, settings), given)

        stock, kept = got(None), got(memo(0.5, 3, resident_layers=EVERYTHING))
        answer[name] = dict(
            one_chunk=[differing(stock, got(memo(ratio, 1))) for ratio in (0.0, 1.0)],
            several=differing(kept, got(memo(0.5, 3))),
            error=largest_error(stock.grads, kept.grads),
            outputs=largest_error(stock.outputs, kept.outputs),
        )
    return answer


FOOTPRINTS = (
    (dict(rope_type="rope", q_lora_rank=None), 1),
    (dict(rope_type="rope", q_lora_rank=24), 1),
    (dict(rope_type="yarn", q_lora_rank=24, qk_layernorm=True), 2),
    (dict(rope_type="rope", q_lora_rank=24, qk_layernorm=True, dtype=torch.bfloat16), 1),
    (dict(rope_type="rope", q_lora_rank=24, qk_layernorm=True, sequence_parallel=False), 1),
)


def latent_footprints():
    """`scenarios.footprints` of latent attention."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = []
    for other, batch in FOOTPRINTS:
        cfg = _config(layers=1, **other)
        shared_by = tp if cfg.sequence_parallel else 1
        given = data(cfg, TOKENS * tp, batch=batch)
        given.rope = None
        shape = LayerShape(
            tokens=TOKENS * shared_by, shared_by=shared_by, batch=batch, hidden=HIDDEN,
            ffn=cfg.ffn_hidden_size // tp, heads=HEADS // tp, groups=HEADS // tp, head_dim=1,
            itemsize=cfg.params_dtype.itemsize, rms_norm=True, qk_norm=cfg.qk_layernorm,
            rotary_dim=8, gated=True, on_cuda=False,
            latent=LatentShape(cfg.q_lora_rank, 16, 16, 8, 16),
        )  # fmt: skip
        built = block_of([_layer(cfg)], cfg, memo(0.5, 1))
        rows += counted_and_told(str(other), built, given, shape)
    return rows
