"""``megatron-memo COMMAND``: the console script.

A command is a module, registered in ``COMMANDS``, with ``HELP`` (one sentence),
``add_arguments(parser)`` and ``run(args) -> int`` (the exit status). ``UNKNOWN_HINT``, if it has
one, follows what is said of arguments that it does not know; such a command takes the flags of a
training run after ``--``, as ``args.flags``. It imports torch, Megatron and the
like inside ``run``, so that ``--help`` and every other command stay fast.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_memo import __version__

# name -> module, in the order in which --help lists them
COMMANDS = {
    "env": "megatron_memo.environment",
    "estimate": "megatron_memo.estimate.cli",
    "calibrate": "megatron_memo.estimate.calibrate_cli",
    "profile": "megatron_memo.profile.cli",
    "plan": "megatron_memo.plan.plan_cli",
    "verify": "megatron_memo.plan.verify_cli",
    "solve": "megatron_memo.plan.solve_cli",
    "import-snapshot": "megatron_memo.profile.snapshot_cli",
    "export-snapshot": "megatron_memo.profile.memory_viz_cli",
    "diff": "megatron_memo.profile.diff_cli",
    "lr-scale": "megatron_memo.lr_scale.cli",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is the command line without the program's name.

    Returns:
        The exit status: the command's, or 2 after a mistake of the user's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="megatron-memo",
        description="Tools around training with Megatron-MEMO. Training itself is started with "
        "torchrun and pretrain_gpt_memo.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-memo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    own, flags = _split(words)
    args, unknown = parser.parse_known_args(own)
    hint = getattr(importlib.import_module(COMMANDS[args.command]), "UNKNOWN_HINT", "")
    if flags:
        args.flags = [*args.flags, *flags]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return int(args.run(args))
    except ValueError as mistake:
        print(f"megatron-memo: error: {mistake}", file=sys.stderr)
        return 2


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
