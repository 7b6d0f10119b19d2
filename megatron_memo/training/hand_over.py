"""What a patched pretrain_gpt.py of a Megatron-LM checkout calls when it is given memo's flags."""

from __future__ import annotations

import sys
from typing import NoReturn

from megatron_memo.training.command_line import log


def hand_over() -> NoReturn:
    """Carry out the process's command line, and end.

    Called by patches/pretrain_gpt-memo-flags.patch before the script imports anything, as memo has
    to come first. Megatron is the checkout's own, from core 0.16 on; forward step, loss, datasets
    and (before 0.19) the function that builds the model are memo's, so what somebody has changed in
    that script has no effect here, and one line says so.
    """
    from megatron_memo.training.main import main

    log(
        f"{sys.argv[0]} has memo's flags: memo's launcher runs this checkout's pretrain, with a "
        "forward step and datasets of memo's own. Changes of yours in that script are not used; "
        "for them start it without --memo-* flags and with --spec megatron_memo.layer.spec "
        "memo_layer_spec."
    )
    main()
    raise SystemExit(0)
