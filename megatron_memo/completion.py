"""``megatron-memo completion SHELL``: a script with which a shell completes these commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

HELP = "Print a script with which your shell completes these commands and their flags."

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
examples: completion now and in every later shell

  source <(megatron-memo completion bash)
  megatron-memo completion bash > ~/.local/share/bash-completion/completions/megatron-memo
  megatron-memo completion zsh > "${fpath[1]}/_megatron-memo"
  megatron-memo completion fish > ~/.config/fish/completions/megatron-memo.fish

Exit status: 0."""
_FILES = ("FILE", "FOLDER", "PLAN", "TRACE")  # metavars of what is read or written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `completion`."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS, help="whose")


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit status."""
    import shtab

    from megatron_memo.cli import make_parser

    parser = make_parser()
    for action in _actions(parser):
        if action.type is Path or str(action.metavar).partition(".")[0] in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of every command."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
