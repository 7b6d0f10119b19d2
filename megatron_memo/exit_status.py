"""What a command's exit status means: one table for all of ``megatron-memo``."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Statuses of commands; `MEANING` says each in words."""

    DONE = 0
    NO = 1
    MISTAKE = 2
    INFEASIBLE = 3
    UNFINISHED = 4
    WRONG = 5
    INTERRUPTED = 130  # 128 and the number of the signal, as shells have it
    PIPE_CLOSED = 141
    TERMINATED = 143


MEANING = {
    Exit.DONE: "done; what was asked is so",
    Exit.NO: "not so: traces differ (diff), training can't run here (env); or Megatron itself "
    "failed, and its message was shown",
    Exit.MISTAKE: "a mistake in the command line or in a file; one line says which, and what to do",
    Exit.INFEASIBLE: "solve: proven that no layout fits the capacity",
    Exit.UNFINISHED: "solve: no layout in time; plan: interrupted, and the best plan so far was "
    "written",
    Exit.WRONG: "verify: the plan is wrong",
    Exit.INTERRUPTED: "Ctrl-C, before there was a result",
    Exit.PIPE_CLOSED: "whoever read the output has left",
    Exit.TERMINATED: "SIGTERM, before there was a result",
}
