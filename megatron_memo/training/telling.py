"""Where numbers of a run go: to all ranks, to Megatron's timers, to its writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gather(answer: Any) -> list[Any]:
    """What each rank answers, in rank order. Collective over all ranks."""
    import torch.distributed as dist

    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def write(iteration: int, scalars: Mapping[str, float]) -> None:
    """To TensorBoard and W&B under `memo/`, where Megatron set them up (on its last rank)."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    named = {f"memo/{name}": value for name, value in scalars.items()}
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board is not None:
        for name, value in named.items():
            board.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(named, iteration)


def say(text: str) -> None:
    """A line in the log, from whichever rank has something to say."""
    print(f"megatron_memo: {text}", flush=True)


def link(name: str, iteration: int, path: str) -> None:
    """Tells TensorBoard (as text) and W&B (in the run's summary) where a file is.

    Args:
        name: what it is; the writers get it under `memo/`.
        iteration: that it is told at.
        path: of the file.
    """
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board is not None:
        board.add_text(f"memo/{name}", path, iteration)
    if wandb is not None and wandb.run is not None:
        wandb.run.summary.update({f"memo/{name}": path})


def time(seconds: Mapping[str, float], steps: int) -> None:
    """To Megatron's timers, which log them where --timing-log-level is 1 or 2. Collective then.

    Args:
        seconds: what a timer of this name would have measured in `steps` steps.
        steps: the log gets the mean of them.
    """
    from megatron.training import get_args, get_timers

    if not seconds or get_args().timing_log_level < 1:
        return
    timers = get_timers()
    for name, value in seconds.items():
        timers(name, log_level=1).set_elapsed(value)
    timers.log(list(seconds), normalizer=steps)
