"""Megatron on a machine without CUDA.

``activate()`` teaches this process to run Megatron's own training code on CPU tensors and gloo
groups. It stands in for the *device API* only: collectives, random streams, autograd, checkpoints
and the optimizer stay the real ones. Nothing outside this package needs to know; code that must
know asks ``is_active()``.

Each shim lives in the file named after what it replaces and says why it exists and when it can go:

========================  ======================================================================
``cuda_api``              functions and classes of ``torch.cuda``
``streams``               ``torch.cuda.Stream`` and ``Event``: every operation has finished already
``device_mode``           ``device="cuda"`` (or an index) in a torch call means the stand-in
``gloo_memory``          memory that gloo asks for is nobody's plan
``torch_shims``           tensor and module methods, ``torch.compile``, ``nccl`` -> ``gloo``
``megatron_shims``        what has to be changed inside Megatron, right after its import
``meta_tensors``          reads of values and addresses of tensors without data (profiles only)
``fake_groups``           collectives of tensors without data (profiles only)
``fused_weight_gradient`` an extension of apex, for tensors without data (profiles only)
========================  ======================================================================

The device that stands for CUDA is the CPU, on which Megatron trains, or torch's meta device, on
which `activate_meta` lets a profile run the same code at any size without computing anything.

Limits: the device mode belongs to the thread that called ``activate()`` (autograd of CPU tensors
runs in the calling thread, so training is covered); another thread must not ask for
``device="cuda"``. CUDA graphs need a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

_active = False
_plays_cuda = False


def is_active() -> bool:
    """True once ``activate()`` has put the CPU in CUDA's place in this process."""
    return _active


def on_cpu() -> bool:
    """True where operators run on the CPU, or in a profile are shown as the CPU runs them."""
    return _active and not _plays_cuda


def activate() -> None:
    """Let Megatron run on this machine's CPU; call it before anything imports ``megatron``.

    A second call does nothing. Rank 0 says in one line that the CPU platform is on.

    Raises:
        RuntimeError: CUDA works here (the real device must be used), or ``megatron`` is already
            imported (its modules have taken references that can no longer be replaced).
    """
    global _active
    if _active:
        return
    _check_first()

    from megatron_memo.platform import (
        cuda_api,
        device_mode,
        gloo_memory,
        megatron_shims,
        torch_shims,
    )

    cuda_api.install()
    torch_shims.install()
    gloo_memory.install()
    device_mode.install()
    megatron_shims.install()
    _active = True
    if int(os.environ.get("RANK", "0")) == 0:
        print("megatron_memo: no CUDA on this machine, training runs on the CPU", flush=True)


def activate_meta(
    *,
    plays_cuda: bool = False,
    instead: Mapping[Any, Callable[..., Any]] | None = None,
    compile_with: Callable[..., Any] | None = None,
    memory: int | None = None,
) -> None:
    """Let Megatron run on tensors without data, for a profile; a fresh process's first call.

    Args:
        plays_cuda: the process shows what a run on CUDA does; else what one on the CPU does.
        instead: functions of torch, and what is called in their place.
        compile_with: stands for ``torch.compile``.
        memory: bytes that the device says it has; None for this machine's.

    Raises:
        RuntimeError: as for ``activate``, or the process runs on its CPU already.
    """
    global _active, _plays_cuda
    if _active:
        raise RuntimeError("this process runs Megatron on its CPU; a profile needs a fresh one")
    _check_first()

    from megatron_memo import compat
    from megatron_memo.platform import (
        cuda_api,
        device_mode,
        fake_groups,
        fused_weight_gradient,
        megatron_shims,
        meta_tensors,
        stand_in,
        torch_shims,
    )

    stand_in.set_device("meta", memory)
    cuda_api.install()
    torch_shims.install(compile_with)
    meta_tensors.install(compat.healthy_value)
    fake_groups.install()
    fused_weight_gradient.install()
    device_mode.install(instead)
    megatron_shims.install()
    _active, _plays_cuda = True, plays_cuda


def _check_first() -> None:
    """Raises RuntimeError where CUDA works or Megatron is imported already."""
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_memo.platform.activate() was called on a machine where CUDA works "
            f"({torch.cuda.device_count()} device(s)). It stands in for a missing CUDA only; "
            "remove the call, or hide the devices with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    early = sorted(name for name in sys.modules if name.split(".", 1)[0] == "megatron")
    if early:
        raise RuntimeError(
            f"megatron is already imported ({early[0]}, {len(early)} module(s)), so the CPU "
            "platform can no longer be put under it. Call megatron_memo.platform.activate() "
            "before the first import of megatron, or start the script with "
            "`python -m megatron_memo.platform SCRIPT ARGS`."
        )
