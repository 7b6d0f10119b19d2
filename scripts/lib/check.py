"""A run's flags through Megatron's own parser and memo's checks, while nothing is started."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence


def check_run(words: Sequence[str], ranks: int, environment: Mapping[str, str]) -> None:
    """Parse and check as the run will. Files that flags name are not looked at.

    Changes this process for good: its command line, its environment, and torch where there is no
    CUDA.

    Args:
        words: Megatron's and memo's flags.
        ranks: of the run.
        environment: the run's variables.

    Raises:
        ValueError: the first mistake, in one line.
    """
    import torch

    from megatron_memo import compat, platform
    from megatron_memo.arguments import (
        check_memo_words,
        memo_config_from_args,
        plan_settings_from_args,
    )

    check_memo_words(words)
    said = io.StringIO()
    sys.argv = [sys.argv[0], *words]
    os.environ.update({**environment, "RANK": "0", "WORLD_SIZE": str(ranks)})
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if not torch.cuda.is_available():
            platform.activate()
        compat.install_import_hooks()
        from megatron.training.arguments import parse_args

        from megatron_memo.training.checks import check_flags
        from megatron_memo.training.command_line import add_arguments
        from megatron_memo.training.modules import choose

        try:
            args = parse_args(extra_args_provider=add_arguments)
        except SystemExit:
            errors = [line for line in said.getvalue().splitlines() if ": error: " in line]
            mistake = errors[-1].partition(": error: ")[2] if errors else "Megatron refuses them"
            raise ValueError(mistake) from None
    memo = memo_config_from_args(args)
    plan_settings_from_args(args)
    check_flags(args, memo, choose(args, memo).replace)
