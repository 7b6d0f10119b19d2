"""The process that plays one rank for a profile: ``python -m megatron_memo.profile.worker``.

A profile changes torch for the rest of a process's life, so each has its own. What it says to the
one that started it goes through a file descriptor as JSON lines: {"at": ...} as it gets on,
{"error": ...} for a mistake of the user's, {"done": ...} with the outcome. Megatron's own messages
go to stdout and stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

EXIT_MISTAKE = 2


def main() -> int:
    """Profiles as the command line says; returns the exit status."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--say-to", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    words = asked.words[1:] if asked.words[:1] == ["--"] else asked.words

    with os.fdopen(asked.say_to, "w") as pipe:

        def say(**what: Any) -> None:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()

        try:
            outcome = _profile(words, asked, say)
        except (ValueError, _Unwritable) as mistake:
            say(error=str(mistake))
            return EXIT_MISTAKE
        say(done={**outcome, "seconds": time.perf_counter() - began})
    return 0


class _Unwritable(Exception):
    """The trace can't be written; one line that says why."""


def _profile(words: list[str], asked: argparse.Namespace, say: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    from megatron_memo.arguments import check_memo_words
    from megatron_memo.profile.periodicity import check_same, describe, layer_kinds
    from megatron_memo.profile.session import profile
    from megatron_memo.profile.summary import peaks
    from megatron_memo.profile.trace import write_trace

    check_memo_words(words)
    sys.argv = sys.argv[:1]
    found = profile(words, device=asked.device, check=asked.check, tell=lambda where: say(at=where))
    kinds = layer_kinds(found.trace, found.resident)
    if found.again is not None:
        layer_kinds(found.again, found.resident)
        check_same(found.trace, found.again)
    try:
        write_trace(Path(asked.out), found.trace)
    except OSError as error:
        raise _Unwritable(f"{asked.out}: {error.strerror or error}") from error
    place = found.place
    return {
        "alike": place.alike,
        "own": place.own,
        "stage": place.stage,
        "stage_starts": place.stage_starts,
        "events": len(found.trace.events),
        "peak": found.trace.peak(),
        "peaks": peaks(found.trace),
        "held": sum(block.size for block in found.trace.held),
        "host_bytes": found.host_bytes,
        "kinds": describe(kinds),
    }


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to do, and tearing down half a million tensors takes seconds.
    os._exit(status)
