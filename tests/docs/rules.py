"""What is done with each command of the documentation: run where a laptop can, checked where not.

What needs GPUs, Slurm or hours goes through the parsers and checks that it would meet first: flags
through Megatron's own parser, memo's checks and Megatron's validation; batch scripts through the
launcher that they call, with --dry-run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

import record
import train
from megatron_memo import cli, platform
from megatron_memo.arguments import check_memo_words
from megatron_memo.config import MemoConfig
from megatron_memo.data import cli as data_cli
from memo_flags import command_parser
from tests.docs.commands import ROOT, Call

# Words that stand for the reader's own.
FLAGS_OF_ANY_JOB = "YOUR-MEGATRON-FLAGS"
# A profile and its plan are of a model of this size; the flags are the page's.
_SMALL = """
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024 --vocab-size 255
"""
_SBATCH_OPTIONS = ("--nodes", "--array", "--export")


@dataclass
class Reader:
    """Somebody who types the commands of one page, in a folder of their own.

    Attributes:
        folder: where.
        shared: results that pages have in common, by the command.
        capsys: takes what is printed.
    """

    folder: Path
    shared: dict[tuple[str, ...], Path]
    capsys: pytest.CaptureFixture[str]

    def does(self, call: Call) -> None:
        """Raises whatever is wrong with the command."""
        words = [
            each
            for word in call.words
            for each in (record.LARGE if word == FLAGS_OF_ANY_JOB else [word])
        ]
        RULES[words[0]](self, Call(call.place, tuple(words), call.variables, call.inline))

    # ---- training

    def trains(self, flags: list[str], ranks: int, variables: dict[str, str]) -> None:
        """Megatron and memo take these flags for so many ranks."""
        from megatron.training.arguments import parse_args, validate_args

        from megatron_memo.training.command_line import (
            ARGS_DEFAULTS,
            add_arguments,
            check_before_start,
        )
        from megatron_memo.training.cpu_defaults import follow_cpu

        with ExitStack() as undo:
            patch = undo.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(sys, "argv", ["pretrain_gpt_memo.py", *flags])
            settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0", "WORLD_SIZE": str(ranks)}
            for name, value in {**settings, **variables}.items():
                patch.setitem(os.environ, name, value)
            check_memo_words(flags)
            args = parse_args(extra_args_provider=add_arguments)
            if platform.is_active():
                follow_cpu(args)
            check_before_start(args)
            validate_args(args, dict(ARGS_DEFAULTS))
            if variables:
                assert args.spec is not None, "MEMO_ variables are read by --spec only"
                MemoConfig.from_env(variables)
        self.capsys.readouterr()

    def config(self, words: list[str], *more: str) -> None:
        """`scripts/train.py` makes a command of these words, and Megatron takes that."""
        (self.folder / "configs").mkdir(exist_ok=True)
        for path in ROOT.glob("configs/*.yaml"):
            shutil.copy(path, self.folder / "configs")
        dry = [] if "--dry-run" in words else ["--dry-run"]
        self.capsys.readouterr()
        assert train.main([*words, *more, *dry]) == 0, self.capsys.readouterr().err
        started = shlex.split(self.capsys.readouterr().out)
        ranks = int(started[started.index("--nproc-per-node") + 1])
        if "--nnodes" in started:
            ranks *= int(started[started.index("--nnodes") + 1])
        self.trains(started[started.index(str(train.SCRIPT)) + 1 :], ranks, {})

    def command(self, words: list[str]) -> str:
        """`megatron-memo`, for real; what it printed."""
        self.capsys.readouterr()
        status = cli.main(words)
        said = self.capsys.readouterr()
        assert status == 0, f"{said.out}\n{said.err}"
        return said.out


def _memo(reader: Reader, call: Call) -> None:
    name, *words = call.words[1:]
    if call.inline:  # a form such as `megatron-memo plan TRACE -o PLAN`
        parser = command_parser(name)
        _, unknown = parser.parse_known_args(words[: words.index("--") if "--" in words else None])
        assert not unknown, unknown
        return
    if name == "estimate" and "--quick" not in words:
        words = ["--quick", *words]
    key = (name, *words)
    if name == "profile":
        words = ["--rank", "0", *words, *_SMALL.split()]
        folder = reader.folder / words[words.index("-o") + 1]
        if key in reader.shared:  # some seconds; pages profile the same model
            shutil.copytree(reader.shared[key], folder)
            return
        reader.command([name, *words])
        reader.shared[key] = folder
        return
    printed = reader.command([name, *words])
    if [name, *words] == record.ESTIMATE:  # as the page shows it
        shown = (record.FOLDER / "estimate.txt").read_text().splitlines()[1:]
        assert printed.splitlines() == shown, "run python docs/record.py estimate"


def _torchrun(reader: Reader, call: Call) -> None:
    words = list(call.words[1:])
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    options, script, flags = words[:at], words[at], words[at + 1 :]
    assert options[0] == "--nproc-per-node", options
    assert len(options) == 2, options
    if script.startswith("benchmarks/"):
        _benchmark([script, *flags])
        return
    assert script in ("pretrain_gpt_memo.py", "pretrain_gpt.py"), script
    assert script == "pretrain_gpt_memo.py" or call.variables, "stock's script, without memo"
    reader.trains(flags, int(options[1]), call.variables)


def _train(reader: Reader, call: Call) -> None:
    reader.config(list(call.words[1:]))


def _sbatch(reader: Reader, call: Call) -> None:
    words = list(call.words[1:])
    options: list[str] = []
    while words[0].startswith("--"):
        options.append(words.pop(0))
        assert options[-1].partition("=")[0] in _SBATCH_OPTIONS, options
        if "=" not in options[-1]:
            options.append(words.pop(0))
    script, config, *flags = words
    text = (ROOT / script).read_text()
    assert "scripts/train.py" in text, script
    nodes = options[options.index("--nodes") + 1] if "--nodes" in options else "1"
    # The script starts one rank a task through srun; as many as torchrun would start.
    several = ["--rdzv", "alpha:29500"] if nodes != "1" else []
    reader.config([config, "--nodes", nodes, *several, *flags])


def _python(reader: Reader, call: Call) -> None:
    script, *words = call.words[1:]
    if script.startswith("benchmarks/"):
        _benchmark([script, *words])
    elif script == "docs/record.py":
        assert set(words) <= set(record.RECORDINGS), words
    else:
        assert script == "scripts/prepare_data.py", script
        prepare_data(reader, words)


def prepare_data(reader: Reader, words: list[str]) -> None:
    source = reader.folder / "FOLDER"
    source.mkdir(exist_ok=True)
    (source / "text.py").write_text("print('hello')\n" * 20000)
    prefix = reader.folder / words[words.index("--output-prefix") + 1]
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink()
    assert data_cli.main([*words, "--workers", "1"]) == 0, reader.capsys.readouterr().err
    assert prefix.with_suffix(".idx").stat().st_size > 0


def _benchmark(words: list[str]) -> None:
    """The file is there, and each flag is one of its parser's."""
    text = (ROOT / words[0]).read_text()
    for flag in (word for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in text, f"{words[0]} has no {flag}"


def _pip(reader: Reader, call: Call) -> None:
    words = list(call.words[1:])
    assert words.pop(0) == "install"
    for flag, value in pairwise(words):
        if flag == "-r":
            assert (reader.folder / value).is_file(), value
        elif flag == "-e":
            assert (reader.folder / value / "pyproject.toml").is_file(), value
    assert set(words) & {"-r", "-e"}, "nothing to install"


def _git(reader: Reader, call: Call) -> None:
    verb, _, folder = call.words[1:]
    assert verb == "clone"
    (reader.folder / folder).symlink_to(ROOT)


def _tool(known: dict[str, str]) -> Callable[[Reader, Call], None]:
    """A tool of the environment, with words that are among the known ones or paths."""

    def check(_: Reader, call: Call) -> None:
        name, *words = call.words
        required = (ROOT / "requirements-dev.txt").read_text()
        assert re.search(rf"^{re.escape(name)}\b", required, re.MULTILINE), name
        for flag, value in zip(words, [*words[1:], ""], strict=False):
            if flag.startswith("-"):
                assert re.fullmatch(known[flag], value), (flag, value)
        for path in (word for word in words if "/" in word):
            assert (ROOT / path).exists(), path

    return check


def _script(reader: Reader, call: Call) -> None:
    """A shell script of ours: it is there, can be run, and takes these words."""
    name, *words = call.words
    assert os.access(ROOT / name, os.X_OK), name
    if name.endswith("test.sh"):
        _tool(PYTEST)(reader, Call(call.place, ("pytest", *words), {}, call.inline))
    elif name.endswith("apply_patches.sh"):
        verb, folder = words
        assert verb in ("check", "apply", "revert") and folder
    elif name.endswith("quickstart.sh"):
        assert words in ([], ["--help"]), words
    elif name.endswith("torchrun.sh"):
        reader.config(words)
    elif name.endswith("test_versions.sh"):
        assert all(re.fullmatch(r"0\.\d+\.\d+", word) for word in words), words
    else:
        assert words in ([], ["-E"]), words


def _kubectl(_: Reader, call: Call) -> None:
    """The file is one that `tests/scripts` reads."""
    verb, flag, path = call.words[1:]
    assert (verb, flag) == ("apply", "-f")
    assert (ROOT / path).is_file(), path


PYTEST = {"-q": r"", "-m": r"gpu", "-k": r"\w+"}
RULES: dict[str, Callable[[Reader, Call], None]] = {
    "megatron-memo": _memo,
    "torchrun": _torchrun,
    "scripts/train.py": _train,
    "sbatch": _sbatch,
    "python": _python,
    ".venv/bin/python": _python,
    "pip": _pip,
    "git": _git,
    "ruff": _tool({"--check": r"\."}),
    "mypy": _tool({}),
    "pytest": _tool(PYTEST),
    "kubectl": _kubectl,
    "./scripts/quickstart.sh": _script,
    "./scripts/torchrun.sh": _script,
    "./scripts/test_versions.sh": _script,
    "./scripts/test.sh": _script,
    "./scripts/docs.sh": _script,
    "./scripts/apply_patches.sh": _script,
}
