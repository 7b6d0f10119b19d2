"""What benchmarks of one layer or head share: their process groups, and how a step is measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_memo import platform
from megatron_memo.ops.target import show_kernels_of
from megatron_memo.profile.storage import StorageMeter


def start_ranks(device: str) -> None:
    """Tensor parallelism over all ranks of torchrun; one rank without it.

    Args:
        device: "cpu" or "cuda"; ends the program if that is not what Megatron would use here. Or
            "meta": one rank on tensors without data, of which only the memory can be measured.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device here. Leave the flag out for the CPU.")
    if device == "cpu" and torch.cuda.is_available():
        sys.exit("--device cpu: this machine has CUDA, where Megatron uses it. Give --device cuda.")
    if device == "cpu":
        platform.activate()
    elif device == "meta":
        show_kernels_of("cpu")
        platform.activate_meta()
    defaults = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)


def peak_of(step: Callable[[], object], device: str) -> int:
    """Bytes above the start that a step reaches at most."""
    if device != "cuda":
        with StorageMeter() as meter:
            step()
        return meter.peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def wait(device: str) -> None:
    """Until every rank has finished what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
