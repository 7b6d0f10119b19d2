"""What memo's launcher does not do on core 0.16 to 0.18. Can go with ``older_model``."""

from __future__ import annotations

from argparse import Namespace

from megatron_memo import compat_versions

# Attribute of the parsed arguments and the user's flag: each needs code of upstream's launch script
# of that version that memo's launcher has for 0.19 only.
_NOT_BEFORE_019 = {
    "mtp_num_layers": "--mtp-num-layers",
    "sft": "--sft",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "yaml_cfg": "--yaml-cfg",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "experimental_attention_variant": "--experimental-attention-variant",
    "use_legacy_models": "--use-legacy-models",
    "record_memory_history": "--record-memory-history",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
}


def check_older(args: Namespace) -> None:
    """Refuse flags that the launcher has no code for in this version of Megatron.

    Args:
        args: Megatron's, parsed; validated or not.

    Raises:
        ValueError: the flag, the version and what to do.
    """
    if compat_versions.describes_models():
        return
    given = [flag for name, flag in _NOT_BEFORE_019.items() if getattr(args, name, None)]
    if getattr(args, "transformer_impl", None) == "inference_optimized":
        given.append("--transformer-impl inference_optimized")
    if given:
        raise ValueError(
            f"{' and '.join(given)}: memo's launcher knows this from Megatron core 0.19 on, and "
            f"this is {compat_versions.version()}. Take 0.19 or newer, or drop the flag."
        )
