"""A mistake of the user's: one paragraph from one rank, exit status 2, no traceback."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

EXIT_STATUS = 2


def exit_with(message: str) -> NoReturn:
    """Print ``message`` to stderr, once for all ranks that fail alike, and leave with status 2."""
    if _first_rank_to_fail():
        print(f"\nmegatron-memo: error: {message}\n", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_STATUS)


def _first_rank_to_fail() -> bool:
    """Whether this rank has to speak.

    torchrun ends the other ranks as soon as one has left, so "rank 0 prints" would often print
    nothing. Its rendezvous store, which every rank can reach before process groups exist, counts
    who comes first. Without it (another launcher) rank 0 speaks.
    """
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return rank == 0

    from torch.distributed import DistError, TCPStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = TCPStore(
            host_name=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )
        return store.add(f"megatron_memo/user_error/{attempt}", 1) == 1
    except DistError:
        return rank == 0
