"""Reads a model's config: YAML in the shape of Megatron-LM's own, with what to launch it on.

ENV_VARS and MODEL_ARGS are as in Megatron-LM's model configs; LAUNCH is ours. In MODEL_ARGS a key
is a flag. Its value is one word; a list gives several words, true the flag alone, and false
nothing. `$NAME` or `${NAME}` in a value is that environment variable's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# Sections of upstream's own files that concern its test system; allowed, so that they can be read.
_NOT_OURS = (
    "TEST_TYPE",
    "LAUNCHER",
    "METRICS",
    "BEFORE_SCRIPT",
    "AFTER_SCRIPT",
    "MODE",
    "MODE_ARGS",
)
_SECTIONS = ("ENV_VARS", "LAUNCH", "MODEL_ARGS")
_LAUNCH = ("NODES", "RANKS_PER_NODE")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
# Sizes whose product has to divide the number of ranks.
PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


@dataclass(frozen=True)
class Config:
    """A model and what it is launched on.

    Attributes:
        path: the file.
        environment: variables for every rank.
        arguments: words of each flag, by flag, in the file's order.
        nodes, ranks_per_node: how many of each; 1 where the file does not say.
    """

    path: Path
    environment: Mapping[str, str]
    arguments: Mapping[str, tuple[str, ...]]
    nodes: int = 1
    ranks_per_node: int = 1

    def flags(self, extra: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
        """The command line: the file's flags, those of them in `extra` replaced by it.

        Args:
            extra: further flags of Megatron's or memo's, as typed.
            without: flags of the file to leave out, with or without their dashes.

        Raises:
            ValueError: `without` names a flag that the file does not have.
        """
        left_out = {f"--{name.removeprefix('--')}" for name in without}
        unknown = sorted(left_out - set(self.arguments))
        if unknown:
            raise ValueError(
                f"--without {unknown[0][2:]}: {self.path} has no {unknown[0]}. Drop it."
            )
        given = {word.partition("=")[0] for word in extra if word.startswith("--")}
        words = []
        for flag, values in self.arguments.items():
            if flag not in left_out | given:
                words += [flag, *values]
        return [*words, *extra]


def read_config(path: Path, env: Mapping[str, str] = os.environ) -> Config:
    """Read and check a config.

    Args:
        path: the file.
        env: where variables in values come from.

    Raises:
        ValueError: file, key, what is wrong with it, and what to write.
    """
    try:
        content = yaml.load(path.read_text(), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). Give a file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: is not YAML: {reason}") from None
    sections = _mapping(path, "the file", content, (*_SECTIONS, *_NOT_OURS))
    if "MODEL_ARGS" not in sections:
        raise ValueError(f"{path}: MODEL_ARGS is missing; give the model's flags there.")
    environment = _mapping(path, "ENV_VARS", sections.get("ENV_VARS") or {})
    launch = _mapping(path, "LAUNCH", sections.get("LAUNCH") or {}, _LAUNCH)
    for key, value in launch.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{path}: LAUNCH: {key}: {value!r} must be a whole number from 1.")
    arguments = {}
    for flag, value in _mapping(path, "MODEL_ARGS", sections["MODEL_ARGS"]).items():
        if not flag.startswith("--"):
            raise ValueError(f"{path}: MODEL_ARGS: {flag}: is no flag. Write --{flag}.")
        words = _words(path, flag, value, env)
        if words is not None:
            arguments[flag] = words
    return Config(
        path,
        {key: _text(path, f"ENV_VARS: {key}", value, env) for key, value in environment.items()},
        arguments,
        launch.get("NODES", 1),
        launch.get("RANKS_PER_NODE", 1),
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.YAMLError(f"{key} is there twice{key_node.start_mark}; keep one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _mapping(
    path: Path, where: str, value: Any, known: Sequence[str] | None = None
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {where} must hold lines of the form `key: value`.")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{path}: {where}: {key}: is no name. Put it in quotes.")
        if known is not None and key not in known:
            raise ValueError(
                f"{path}: {where}: {key}: is not known. There are {', '.join(known[:3])}."
            )
    return value


def _words(path: Path, flag: str, value: Any, env: Mapping[str, str]) -> tuple[str, ...] | None:
    if isinstance(value, bool):
        return () if value else None
    if isinstance(value, list):
        return tuple(_text(path, f"MODEL_ARGS: {flag}", item, env) for item in value)
    return (_text(path, f"MODEL_ARGS: {flag}", value, env),)


def _text(path: Path, key: str, value: Any, env: Mapping[str, str]) -> str:
    if value is None or isinstance(value, (dict, list, bool)):
        remedy = "Write true for a flag without a value, or the value." if value is None else ""
        what = "has no value" if value is None else f"cannot be {value!r}"
        raise ValueError(f"{path}: {key}: {what}. {remedy}".rstrip())
    return _VARIABLE.sub(_expander(path, key, env), str(value))


def _expander(path: Path, key: str, env: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def expand(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in env:
            raise ValueError(
                f"{path}: {key}: the environment has no {name}. Set it: export {name}=..."
            )
        return env[name]

    return expand


def check_ranks(config: Config, ranks: int, flags: Sequence[str]) -> None:
    """The ranks divide into groups of the parallel sizes.

    Args:
        ranks: of all nodes together.
        flags: the whole command line, of which the last mention of a flag counts.

    Raises:
        ValueError: they do not.
    """
    sizes = {flag: _size(flags, flag) for flag in PARALLEL}
    product = 1
    for size in sizes.values():
        product *= size
    if ranks % product:
        named = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        raise ValueError(
            f"{config.path}: {ranks} ranks do not divide by {product} ({named}). Give --nodes and "
            f"--ranks-per-node whose product is a multiple of {product}, or other sizes."
        )


def _size(flags: Sequence[str], flag: str) -> int:
    text = "1"
    for index, word in enumerate(flags):
        if word == flag and index + 1 < len(flags):
            text = flags[index + 1]
        elif word.startswith(f"{flag}="):
            text = word.partition("=")[2]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{flag} {text}: must be a whole number from 1.")
    return int(text)
