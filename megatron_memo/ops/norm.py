"""LayerNorm and RMSNorm that work under sequence parallelism, in plain torch."""

from torch import nn


class _SequenceParallelMark:
    """Marks a norm's parameters so that Megatron all-reduces their gradients over tp.

    Under sequence parallelism each rank normalises its own tokens, so a norm's weight gradient is
    a partial sum; `megatron.core.distributed.finalize_model_grads` completes it for parameters
    with `sequence_parallel` set. Upstream's WrappedTorchNorm refuses instead (0.19.2:
    "sequence parallel not supported by torch LayerNorm"); drop ours when it sets the mark.
    """

    def _mark(self: nn.Module, sequence_parallel: bool) -> None:  # type: ignore[misc]
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(nn.LayerNorm, _SequenceParallelMark):
    """torch's LayerNorm, parameters marked for sequence parallelism."""


class RMSNorm(nn.RMSNorm, _SequenceParallelMark):
    """torch's RMSNorm, parameters marked for sequence parallelism."""


class norm:
    """Builds the norm that `config.normalization` names, in upstream's LayerNormBuilder form.

    A class as upstream's WrappedTorchNorm is one: before 0.17 ``build_module`` takes a function for
    a module that is there already.

    Args:
        config: TransformerConfig; read are normalization, params_dtype, sequence_parallel,
            layernorm_zero_centered_gamma.
        hidden_size: size of the last dimension.
        eps: added to the variance.

    Returns:
        Module mapping [s, b, h] to [s, b, h]; state dict keys as upstream's (weight, bias).

    Raises:
        ValueError: zero-centred gamma, or a normalization that torch does not have.
    """

    def __new__(  # type: ignore[misc]
        cls, config, hidden_size: int, eps: float = 1e-5, **_unused_upstream_options
    ) -> nn.Module:
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "--apply-layernorm-1p: memo's own norm has no zero-centred gamma. Leave the flag "
                "out, or use --transformer-impl transformer_engine, whose norm has it."
            )
        kinds: dict[str, type] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization {config.normalization}: memo's own norm is one of "
                f"{sorted(kinds)}. Use --transformer-impl transformer_engine for others."
            )
        module = kinds[config.normalization](hidden_size, eps=eps)
        module._mark(config.sequence_parallel)
        return module
