"""The commands in the documentation, as a shell would start them.

NOTE: how they are found
------------------------
Fenced blocks without a language, and those of `bash`, are run by a real bash, block after block of
a page, so that variables, quotes and continued lines mean what they mean. Programs that it finds
are stand-ins that only note how they were called; any other program is an error, so that each has
to have a rule (`tests/docs/rules.py`). Code within a sentence counts as a command if it begins with
such a program and gives it something to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / folder / "README.md" for folder in ("configs", "patches")),
    ]
)
# Languages of blocks that are not commands, and directives.
NO_COMMANDS = ("text", "{")
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^ *(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_BASH = shutil.which("bash") or "/bin/bash"
# What a stand-in does: variables for memo, then the words, each ended by NUL; then a record's end.
_STAND_IN = """#!{bash}
{{
    for name in ${{!MEMO_@}}; do printf '%s=%s\\0' "$name" "${{!name}}"; done
    printf '%s\\0' "{name}" "$@"
    printf '\\036\\0'
}} >>"$DOCS_CALLS"
"""
_END = "\x1e"


@dataclass(frozen=True)
class Call:
    """One command.

    Attributes:
        place: the page, and the line for a block.
        words: the program and its arguments.
        variables: MEMO_... that it was given.
        inline: it stands in a sentence, where it may be a form to fill in.
    """

    place: str
    words: tuple[str, ...]
    variables: dict[str, str]
    inline: bool

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.words)}"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """The outermost fenced blocks of a page."""
    return [
        Block(
            text[: found.start()].count("\n") + 1,
            found["language"].strip(),
            textwrap.dedent(found["text"]),
        )
        for found in _FENCE.finditer(text)
    ]


def sentences(text: str) -> list[str]:
    """Code within the sentences of a page."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", text))]


def calls(page: Path, programs: Iterable[str], folder: Path) -> list[Call]:
    """All commands of a page.

    Args:
        page: a Markdown file.
        programs: those that have a rule.
        folder: an empty one, to make stand-ins in.

    Raises:
        AssertionError: a block calls another program, or is not right in itself.
    """
    programs = list(programs)
    _stand_in_for(programs, folder)
    text, name, found = page.read_text(), str(page.relative_to(ROOT)), []
    before = ""  # variables of a block hold in later ones
    for block in blocks(text):
        if block.language.startswith(NO_COMMANDS):
            continue
        assert block.language in ("", "bash"), f"{name}:{block.line}: is {block.language} run?"
        place = f"{name}:{block.line}"
        done = _shell(before + block.text, folder)
        assert done.returncode == 0, f"{place}: {done.stderr.strip()}: has no rule, or is no shell"
        assert done.stdout == "", f"{place}: {done.stdout}"
        found += _read(folder, place, inline=False)
        before += "".join(
            f"{line}\n" for line in re.findall(r'^\w+="[^"]*"$', block.text, re.MULTILINE)
        )
    for code in sentences(text):
        words = code.split()
        if words[0] in programs and len(words) > 2:
            done = _shell(before + code, folder)
            assert done.returncode == 0, f"{name}: `{code}`: {done.stderr.strip()}"
            found += _read(folder, name, inline=True)
    return found


def _stand_in_for(programs: Iterable[str], folder: Path) -> None:
    for name in programs:
        path = folder / (name if "/" in name else f"bin/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_STAND_IN.format(bash=_BASH, name=name))
        path.chmod(0o755)


def _shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(folder / "bin"), "HOME": str(folder), "DOCS_CALLS": str(folder / "calls")}
    return subprocess.run(
        [_BASH, "-euc", text],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _read(folder: Path, place: str, *, inline: bool) -> list[Call]:
    path, found = folder / "calls", []
    if not path.exists():
        return []
    for record in path.read_text().split(f"{_END}\0")[:-1]:
        words = record.split("\0")[:-1]
        settings = [word for word in words if re.match(r"MEMO_\w+=", word)]
        variables = dict(word.split("=", 1) for word in settings)
        rest = tuple(word for word in words if word not in settings)
        found.append(Call(place, rest, variables, inline))
    os.remove(path)
    return found
