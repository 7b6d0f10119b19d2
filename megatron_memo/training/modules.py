"""Which layer specs a run uses: upstream's, or ours over them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_memo.config import MemoConfig

Spec = Callable[..., Any]


@dataclass(frozen=True)
class ModuleChoice:
    """Outcome of ``choose``.

    Attributes:
        replace: our specs are used.
        why: for the log; empty where nothing is replaced.
    """

    replace: bool
    why: str = ""


def choose(args: argparse.Namespace, memo: MemoConfig | None) -> ModuleChoice:
    """Decide from ``--memo-modules``, the swap ratio, and what upstream's local modules refuse.

    Raises:
        ValueError: ``--memo-modules upstream`` with a ratio over the local transformer, whose
            attention keeps s x s scores that no token chunk can avoid.
    """
    wanted = getattr(args, "memo_modules", "auto")
    local = getattr(args, "transformer_impl", "local") == "local"
    if wanted == "upstream":
        if memo is not None and local:
            raise ValueError(
                f"--memo-modules upstream: with --memo-swap-ratio {memo.swap_ratio:g} and "
                "--transformer-impl local the layer needs an attention that does not keep s x s "
                "scores, which upstream's local one does. Drop --memo-modules, or use "
                "--transformer-impl transformer_engine."
            )
        return ModuleChoice(memo is not None)
    if memo is not None:
        return ModuleChoice(True)
    if wanted == "memo":
        return ModuleChoice(True, "asked for by --memo-modules memo")
    refusal = _upstream_refuses(args) if local else ""
    return ModuleChoice(bool(refusal), refusal)


def layer_spec(memo: MemoConfig | None) -> Spec:
    """What goes into ``GPTModelConfig.transformer_layer_spec`` where our specs are used."""
    from megatron_memo.layer.spec import block_spec

    def spec(model_config: Any, vp_stage: int | None = None) -> Any:
        return block_spec(model_config, memo, vp_stage=vp_stage)

    return spec


def _upstream_refuses(args: argparse.Namespace) -> str:
    """Why upstream's local modules would not run with these flags; empty if they would."""
    # A spec is the user's choice.
    if getattr(args, "spec", None):
        return ""
    if (getattr(args, "context_parallel_size", None) or 1) > 1:
        return "upstream's local attention refuses --context-parallel-size above 1"
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            return f"upstream's local attention refuses the packed sequences of {_flag(name)}"
    # RMSNorm is torch's in upstream's local spec even where apex is installed.
    if _have_apex_norm() and args.normalization != "RMSNorm":
        return ""
    tp = getattr(args, "tensor_model_parallel_size", None) or 1
    if args.sequence_parallel and tp > 1:
        return "upstream's torch norm refuses --sequence-parallel"
    if not args.no_persist_layer_norm:
        return "upstream's torch norm refuses to run without --no-persist-layer-norm"
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _have_apex_norm() -> bool:
    """Whether NVIDIA's apex is here; PyPI's package of that name is another project."""
    try:
        return importlib.util.find_spec("apex.normalization.fused_layer_norm") is not None
    except ModuleNotFoundError:
        return False
