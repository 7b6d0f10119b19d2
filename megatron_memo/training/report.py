"""``--memo-report``: what a run did, as one JSON file written by rank 0 when training ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform as machine
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import megatron_memo
from megatron_memo import platform
from megatron_memo.config import MemoConfig

if TYPE_CHECKING:
    from megatron_memo.training.auto_ratio import AutoRatio
    from megatron_memo.training.planned import PlannedSteps

LOSS = "lm loss"


class Recorder:
    """Times and meters training steps through ``compat.wrap_train_step``.

    Args:
        path: the file to write.
        memo: the run's settings.
        metered: iteration (from 1) whose activation memory is measured, or None.
        planned: asked at the end what it did, if the run has a memory plan.
        auto: asked at the end for the ratio, if the run has found it.
    """

    def __init__(
        self,
        path: str,
        memo: MemoConfig | None,
        metered: int | None,
        planned: PlannedSteps | None = None,
        auto: AutoRatio | None = None,
    ) -> None:
        self._path = path
        self._planned = planned
        self._auto = auto
        self._memo = memo
        self._metered = metered
        self._iterations: list[dict[str, Any]] = []
        self._peak: int | None = None
        self._held: int | None = None

    def step(self, iteration: int, run: Callable[[], tuple]) -> tuple:
        """Run one training step and note its seconds and loss; returns what the step returned."""
        _synchronize()
        start = time.perf_counter()
        result = run()
        _synchronize()
        seconds = time.perf_counter() - start
        loss = _loss_of_last_stage(result[0].get(LOSS))
        self._iterations.append(
            {
                "iteration": iteration,
                "seconds": seconds,
                "lm_loss": loss,
                "metered": iteration == self._metered,
            }
        )
        return result

    def forward_backward(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Run forward and backward of a step, under the meter if it is that iteration's turn."""
        if iteration != self._metered:
            return run()
        self._held = _largest_of_all_ranks(_held_bytes())
        with _peak_memory() as peak:
            result = run()
        self._peak = _largest_of_all_ranks(peak())
        return result

    def write(self) -> None:
        """Write the file; rank 0 only, in one move, so a reader never sees half of it."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        part = f"{self._path}.part"
        with open(part, "w") as file:
            json.dump(self.content(), file, indent=1)
            file.write("\n")
        os.replace(part, self._path)

    def content(self) -> dict[str, Any]:
        """What the file holds. Losses are exact: JSON's decimals give the same double back."""
        return {
            **_run(),
            "memo": None if self._memo is None else self._settings(self._memo),
            "iterations": self._iterations,
            "held_bytes": self._held,
            "peak_activation_bytes": self._peak,
            "swap": None if self._memo is None else _swap_stats(),
            "plan": None if self._planned is None else self._planned.report(),
            "versions": versions(),
            "device": "cpu" if platform.is_active() else torch.cuda.get_device_name(),
        }

    def _settings(self, memo: MemoConfig) -> dict[str, Any]:
        ratio = None if self._auto is None else self._auto.ratio
        settings = memo if ratio is None else dataclasses.replace(memo, swap_ratio=ratio)
        return dataclasses.asdict(settings)


def versions() -> dict[str, str]:
    """Versions of what a result depends on; packages that are absent are left out."""
    found = {
        "python": machine.python_version(),
        "megatron-memo": megatron_memo.__version__,
        "torch": torch.__version__,
    }
    for name in ("megatron-core", "transformer-engine", "flash-attn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _run() -> dict[str, Any]:
    """What `megatron-memo calibrate` knows the run by: sizes and layout (None for a model that no
    estimate knows), and what Megatron recomputes."""
    from megatron.training import get_args

    from megatron_memo.estimate.job import Job

    args = get_args()
    try:
        job = dataclasses.asdict(Job.from_args(args))
    except ValueError:
        job = None
    return {"job": job, "recompute": getattr(args, "recompute_granularity", None)}


def _swap_stats() -> dict[str, Any]:
    from megatron_memo.swap.engine import get_engine

    return get_engine().stats()


def _synchronize() -> None:
    if not platform.is_active():
        torch.cuda.synchronize()


def _held_bytes() -> int:
    """Device memory of what lives through an iteration: weights, gradients, optimizer state."""
    if not platform.is_active():
        return torch.cuda.memory_allocated()
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}
    everything = sum(storage.nbytes() for storage in storages.values())
    return everything - int(_swap_stats()["host_bytes"])  # without a GPU they are tensors as well


@contextlib.contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes above the start the body reached at most."""
    if platform.is_active():
        from megatron_memo.profile.storage import StorageMeter

        with StorageMeter() as meter:
            yield lambda: meter.peak_bytes
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - start


def _loss_of_last_stage(loss: Any) -> float | None:
    """The exact loss, which only the last pipeline stage has, on every rank of the pipeline."""
    from megatron.core import parallel_state

    value = None if loss is None else float(loss)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    told = [value]
    torch.distributed.broadcast_object_list(
        told,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return told[0]


def _largest_of_all_ranks(value: int) -> int:
    if not torch.distributed.is_initialized():
        return value
    device = torch.device("cpu") if platform.is_active() else torch.device("cuda")
    largest = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest.item())
