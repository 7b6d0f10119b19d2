"""``torch.cuda`` as Megatron uses it, answered for the one device that stands in.

Why: Megatron calls ``torch.cuda`` directly for its device, seeds, streams and statistics.
Can go when Megatron goes through ``torch.accelerator`` everywhere.

Random numbers are real: the "CUDA generator" is torch's default CPU generator, so Megatron's RNG
tracker forks, stores and restores true generator states.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_memo.platform import stand_in
from megatron_memo.platform.askers import asked_by_megatron
from megatron_memo.platform.streams import THE_STREAM, Event, Stream, StreamContext

# Megatron derives rules from the architecture: below 10 it insists on CUDA_DEVICE_MAX_CONNECTIONS=1
# for tensor parallelism, an ordering of device queues that a CPU does not have.
CAPABILITY = (10, 0)


def is_available() -> bool:
    """True for Megatron, False (the truth) for everyone else; see ``askers``."""
    return asked_by_megatron()


def device_count() -> int:
    """One device for each process of this machine for Megatron, none for everyone else."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if asked_by_megatron() else 0


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the default generator, uint8."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the default generator."""
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the default generator."""
    torch.default_generator.manual_seed(int(seed))


class Generators:
    """``torch.cuda.default_generators`` with the default CPU generator at every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def host_memory() -> int:
    """Physical memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Free memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """The fields of a device's properties that Megatron reads."""
    return SimpleNamespace(
        name=stand_in.device().type,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=os.cpu_count() or 1,
        total_memory=stand_in.memory() or host_memory(),
    )


def _returns(value: Any) -> Callable[..., Any]:
    """A new function that answers ``value`` to anything.

    New each time: torch's compiler keeps tables of ``torch.cuda``'s functions by identity and
    refuses one object under two names.
    """
    return lambda *args, **kwargs: value


class DeviceContext(StreamContext):
    """Stands for ``torch.cuda.device(...)``: there is no other device to switch to."""


def _typed_tensor(name: str, dtype: torch.dtype) -> type:
    """A stand-in for ``torch.cuda.<name>``: makes tensors, and knows them by isinstance."""

    class Meta(type):
        def __call__(cls, data: Any = (), *sizes: int) -> torch.Tensor:
            if isinstance(data, int):
                return torch.empty((data, *sizes), dtype=dtype, device=stand_in.device())
            return torch.tensor(data, dtype=dtype, device=stand_in.device())

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torch.Tensor) and instance.dtype == dtype

    return Meta(name, (), {"dtype": dtype})


TYPED_TENSORS = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}

FUNCTIONS: dict[str, Any] = {
    "is_available": is_available,
    "device_count": device_count,
    "is_initialized": _returns(True),
    "init": _returns(None),
    "_lazy_init": _returns(None),
    # Real torch queues these calls until the driver is up, which would be never.
    "_lazy_call": lambda call, **kwargs: call(),
    "current_device": lambda: stand_in.device(),
    "set_device": _returns(None),
    "synchronize": _returns(None),
    "empty_cache": _returns(None),
    "ipc_collect": _returns(None),
    "is_current_stream_capturing": _returns(False),
    "get_device_name": lambda device=None: stand_in.device().type,
    "get_device_capability": _returns(CAPABILITY),
    "get_device_properties": get_device_properties,
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "manual_seed": manual_seed,
    "manual_seed_all": lambda seed: manual_seed(seed),
    "default_generators": Generators(),
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "stream": StreamContext,
    "device": DeviceContext,
    "current_stream": _returns(THE_STREAM),
    "default_stream": _returns(THE_STREAM),
    "set_stream": _returns(None),
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(0),
    "memory_reserved": _returns(0),
    "max_memory_reserved": _returns(0),
    "device_memory_used": _returns(0),
    "reset_peak_memory_stats": _returns(None),
    "mem_get_info": lambda device=None: (free_memory(), host_memory()),
    "utilization": _returns(0),
    "temperature": _returns(0),
    "power_draw": _returns(0),
    "clock_rate": _returns(0),
    "_sleep": _returns(None),
}


def install() -> None:
    """Put the stand-ins into ``torch.cuda`` and the submodules Megatron reaches by name."""
    cuda: Any = torch.cuda
    for name, value in FUNCTIONS.items():
        setattr(cuda, name, value)
    for name, dtype in TYPED_TENSORS.items():
        setattr(cuda, name, _typed_tensor(name, dtype))
    rng: Any = torch.cuda.random
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(rng, name, FUNCTIONS[name])
    nvtx: Any = torch.cuda.nvtx
    marks: dict[str, Callable[..., Any]] = {
        "range_push": _returns(None),
        "range_pop": _returns(None),
        "range_start": _returns(None),
        "range_end": _returns(None),
        "mark": _returns(None),
        "range": StreamContext,
    }
    for name, value in marks.items():
        setattr(nvtx, name, value)
