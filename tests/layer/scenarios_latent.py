"""What the worker processes do about multi-latent attention (see scenarios)."""

from harness import block_of, config, data, differing, largest_error, run
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from scenarios import EVERYTHING, memo

VARIANTS = {
    "rope, whole queries": dict(rope_type="rope", q_lora_rank=None),
    "yarn, latent queries": dict(rope_type="yarn", q_lora_rank=24, qk_layernorm=True),
}


def latent_attention():
    """By variant: what differs from stock in one chunk, and from kept chunks in several."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    answer = {}
    for name, other in VARIANTS.items():
        cfg = config(
            "llama", layers=3, cls=MLATransformerConfig, multi_latent_attention=True,
            num_query_groups=4, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
            v_head_dim=16, **other,
        )  # fmt: skip
        layer = get_gpt_layer_local_spec(
            multi_latent_attention=True, qk_layernorm=cfg.qk_layernorm,
            normalization=cfg.normalization,
        )  # fmt: skip
        given = data(cfg, 41 * tp, 2)
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
