"""The command line of a training run, as a profile runs it: what reads or writes files is left out.

The trace does not depend on it: data and checkpoints have the shapes that other flags say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

# Every expert of a layer gets the same number of tokens, in all as many as without a limit.
EVEN_EXPERTS = (
    *("--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1"),
    "--moe-pad-expert-input-to-capacity",
)
# Flags without which a run reads no data and no checkpoint, writes nothing, and does nothing
# between two steps; by the number of words that follow.
_LEFT_OUT: dict[int | str, tuple[str, ...]] = {
    0: (
        "--mock-data",
        "--log-throughput",
        "--use-checkpoint-args",
        "--fake-process-group",
        "--use-cpu-initialization",
        "--init-model-with-meta-device",
        "--exit-signal-handler",
        "--profile",
        "--record-memory-history",
        "--full-validation",
        "--log-progress",
    ),
    1: (
        "--data-args-path",
        "--per-split-data-args-path",
        "--data-cache-path",
        "--split",
        "--dataloader-type",
        "--num-workers",
        "--load",
        "--save",
        "--save-interval",
        "--pretrained-checkpoint",
        "--ckpt-step",
        "--tensorboard-dir",
        "--wandb-project",
        "--wandb-exp-name",
        "--wandb-save-dir",
        "--eval-interval",
        "--eval-iters",
        "--log-interval",
        "--exit-interval",
        "--exit-duration-in-mins",
        "--memo-report",
        "--memo-measure-memory",
        "--distributed-backend",
        "--train-iters",  # of a short run as well, a second iteration has to be followed by a third
    ),
    "+": ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
    3: ("--rampup-batch-size",),
}
_PUT_IN = (
    "--fake-process-group --mock-data --dataloader-type external --num-workers 0 "
    "--eval-interval 1000000 --eval-iters 0 --log-interval 1000000"
)
_SAMPLES = "--train-samples"
_ENOUGH_STEPS = "1000000"


def profiled_words(words: Sequence[str]) -> list[str]:
    """Megatron's words without those above, and with what a profile needs.

    Args:
        words: the command line of the training run, without the program's name.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for count, flags in _LEFT_OUT.items():
        for flag in flags:
            if count == 0:
                parser.add_argument(flag, action="store_true")
            else:
                parser.add_argument(flag, nargs=count)
    _, rest = parser.parse_known_args(list(words))
    given = {word.partition("=")[0] for word in rest}
    if _SAMPLES not in given:
        rest += ["--train-iters", _ENOUGH_STEPS]
    return [*rest, *_PUT_IN.split()]
