"""Pages of flags, from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib

from megatron_memo.arguments import add_memo_arguments
from megatron_memo.cli import COMMANDS
from memo_text import prose

LAUNCHER = "pretrain_gpt_memo.py"


def launcher_flags() -> str:
    """Markdown of the flags that the launcher adds to Megatron's."""
    parser = argparse.ArgumentParser(add_help=False)
    add_memo_arguments(parser)
    return f"```{{program}} {LAUNCHER}\n```\n\n" + _options(parser)


def commands() -> str:
    """Markdown of every `megatron-memo` command, a section each."""
    return "\n\n".join(_section(command_parser(name), "###") for name in COMMANDS)


def _section(parser: argparse.ArgumentParser, level: str) -> str:
    """A command: usage, flags, what its help ends with, and the commands that it has itself."""
    parts = [
        f"{level} {parser.prog}",
        prose(parser.description or ""),
        _block("console", f"$ {_usage(parser)}"),
        f"```{{program}} {parser.prog}\n```",
        _options(parser),
    ]
    if parser.epilog:
        parts.append(_epilog(parser))
    parts += [_section(each, f"{level}#") for each in kinds(parser)]
    return "\n\n".join(parts)


def kinds(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of a command that has commands itself."""
    return [
        each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action.choices.values()
    ]


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser that `megatron-memo NAME` uses, made as megatron_memo.cli makes it."""
    module = importlib.import_module(COMMANDS[name])
    parser = argparse.ArgumentParser(prog=f"megatron-memo {name}", description=module.HELP)
    module.add_arguments(parser)
    return parser


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The flags and words of a parser that its help shows, without --help itself."""
    return [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]


def heading(action: argparse.Action) -> str:
    """`-o PLAN, --output PLAN`, as argparse shows it."""
    value = ""
    if action.nargs != 0:
        formatter = argparse.HelpFormatter("")
        default = action.dest.upper() if action.option_strings else action.dest
        value = " " + formatter._format_args(action, default)
    if not action.option_strings:
        return value.strip()
    return ", ".join(flag + value for flag in action.option_strings)


def _options(parser: argparse.ArgumentParser) -> str:
    return "\n\n".join(
        f"::::{{option}} {heading(action)}\n{_help(parser, action)}\n::::"
        for action in shown(parser)
    )


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return prose(argparse.HelpFormatter(parser.prog)._expand_help(action)) if action.help else ""


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog, width=92)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().strip()


def _epilog(parser: argparse.ArgumentParser) -> str:
    """As it is shown: kept in lines where it holds examples, else as a paragraph."""
    assert parser.epilog is not None
    lines = (parser.epilog % {"prog": parser.prog}).strip("\n")
    return _block("text", lines) if "\n" in lines.strip() else prose(lines)


def _block(language: str, text: str) -> str:
    return f"``````{{code-block}} {language}\n{text}\n``````"
