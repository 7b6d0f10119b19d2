"""NVIDIA ModelOpt, which a Megatron-LM checkout has hooks for and the wheel has not."""

from __future__ import annotations

from typing import Any

try:
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.post_training.loss_func import loss_func as distillation_loss
    from megatron.post_training.model_builder import ModelOptModelConfig
    from megatron.post_training.utils import maybe_enable_modelopt
except ImportError:
    AVAILABLE = False

    def distillation_loss(*args: Any, **kwargs: Any) -> Any:
        """Never reached: ``modelopt_enabled`` cannot be set without ModelOpt."""
        raise RuntimeError("NVIDIA ModelOpt is not installed")
else:
    AVAILABLE = True


def add_arguments(parser: Any) -> Any:
    """Add ModelOpt's flags where it is installed."""
    return add_modelopt_args(parser) if AVAILABLE else parser


def enable(args: Any) -> None:
    """Let ModelOpt switch itself on, as its flags ask."""
    if AVAILABLE:
        maybe_enable_modelopt(args)


def config_class(args: Any) -> type | None:
    """The model config class that ModelOpt needs, or None for the usual one."""
    return ModelOptModelConfig if getattr(args, "modelopt_enabled", False) else None
