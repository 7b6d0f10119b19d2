"""Megatron's defaults that only a GPU can follow, and what stands for them on the CPU platform.

Each of these chooses a kernel, never a function: the same numbers come from the plain code. So a
Megatron command line runs here as it is, and one log line says what was added to it.
"""

from __future__ import annotations

import argparse
from typing import Any

# attribute of Megatron's arguments, its value that needs CUDA, the value here, the flag for that
_CHANGES: tuple[tuple[str, Any, Any, str], ...] = (
    ("transformer_impl", "transformer_engine", "local", "--transformer-impl local"),
    ("distributed_backend", "nccl", "gloo", "--distributed-backend gloo"),
    ("gradient_accumulation_fusion", True, False, "--no-gradient-accumulation-fusion"),
    ("masked_softmax_fusion", True, False, "--no-masked-softmax-fusion"),
    ("apply_rope_fusion", True, False, "--no-rope-fusion"),
    ("no_persist_layer_norm", False, True, "--no-persist-layer-norm"),
)


def follow_cpu(args: argparse.Namespace) -> list[str]:
    """Change ``args`` in place; returns the flags that say the same on the command line."""
    flags = []
    for name, needs_cuda, here, flag in _CHANGES:
        if getattr(args, name, here) == needs_cuda:
            setattr(args, name, here)
            flags.append(flag)
    return flags
