"""``megatron-memo COMMAND``: the console script.

A command is a module, registered in ``COMMANDS``, with ``HELP`` (one sentence),
``add_arguments(parser)`` and ``run(args) -> int`` (the exit status). ``UNKNOWN_HINT``, if it has
one, follows what is said of arguments that it does not know; such a command takes the flags of a
training run after ``--``, as ``args.flags``. Its epilog begins with "examples:" and commands that
work, and it ends with a status of ``exit_status``. It imports torch, Megatron and the like inside
``run``, so that ``--help`` and every other command stay fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from megatron_memo import __version__
from megatron_memo.cli_help import HelpFormatter, aligned
from megatron_memo.exit_status import MEANING, Exit

# name -> module, in the order in which --help lists them
COMMANDS = {
    "env": "megatron_memo.environment",
    "estimate": "megatron_memo.estimate.cli",
    "calibrate": "megatron_memo.estimate.calibrate_cli",
    "profile": "megatron_memo.profile.cli",
    "plan": "megatron_memo.plan.plan_cli",
    "verify": "megatron_memo.plan.verify_cli",
    "plot": "megatron_memo.plot.cli",
    "solve": "megatron_memo.plan.solve_cli",
    "import-snapshot": "megatron_memo.profile.snapshot_cli",
    "export-snapshot": "megatron_memo.profile.memory_viz_cli",
    "diff": "megatron_memo.profile.diff_cli",
    "lr-scale": "megatron_memo.lr_scale.cli",
    "completion": "megatron_memo.completion",
}

_EPILOG = f"""\
examples: does a run fit, what does it ask of memory, how is that laid out

  megatron-memo estimate --gpu a800-80g --nodes 1 -- MEGATRON-FLAGS --memo-swap-ratio auto
  megatron-memo profile -o traces -- MEGATRON-FLAGS --memo-swap-ratio 0.3
  megatron-memo plan traces -o plans

COMMAND --help has more of each.

exit status:
{aligned({str(int(status)): meaning for status, meaning in MEANING.items()})}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is the command line without the program's name.

    Returns:
        The exit status, one of `exit_status.MEANING`: the command's, or that of a mistake of the
        user's or of an end from outside.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(words)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except ValueError as mistake:
        print(f"megatron-memo: error: {mistake}", file=sys.stderr)
        return Exit.MISTAKE
    except BrokenPipeError:
        # As `| head` does. What is still buffered must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE_CLOSED
    except OSError as error:
        print(f"megatron-memo: error: {_words_of(error)}", file=sys.stderr)
        return Exit.MISTAKE
    except KeyboardInterrupt:
        print("megatron-memo: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="megatron-memo",
        description="Tools around training with Megatron-MEMO. Training itself is started with "
        "torchrun and pretrain_gpt_memo.py.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-memo {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True
    )
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command; its flags of a training run are ``flags``.

    Raises:
        SystemExit: status 2 after a mistake, which has been shown; 0 after ``--help``.
    """
    parser = make_parser()
    own, flags = _split(list(words))
    args, unknown = parser.parse_known_args(_with_negative_values(own))
    hint = getattr(importlib.import_module(COMMANDS[args.command]), "UNKNOWN_HINT", "")
    if flags:
        args.flags = [*args.flags, *flags]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _with_negative_values(words: list[str]) -> list[str]:
    """``--flag -1GiB`` as ``--flag=-1GiB``: argparse would take -1GiB for a flag, and say that
    --flag has no value, where its own check says what is wrong with this one."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        if re.match(r"-\.?\d", word) and before.startswith("--") and "=" not in before:
            joined[-1] = f"{before}={word}"
        else:
            joined.append(word)
    return joined


def _words_of(error: OSError) -> str:
    why = error.strerror or str(error)
    return f"{error.filename}: {why}" if error.filename else why


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and those after ``--`` where it takes the flags of a run.

    argparse would not find these after another positional argument and an option.
    """
    command = next((word for word in words if word in COMMANDS), None)
    takes_flags = command and hasattr(importlib.import_module(COMMANDS[command]), "UNKNOWN_HINT")
    if not takes_flags or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
