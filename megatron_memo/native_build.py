"""Builds C++ libraries on the user's machine at first use: plain compiler, cached, locked.

A library is kept in the user's cache folder under a name that hashes sources, flags, compiler and
whatever else its recipe depends on, so an update of any of them builds anew. A file lock keeps
processes that start together (the ranks of a node) from building it twice; the finished file
replaces the target in one step, so nobody loads half a library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILD_SECONDS = 300


class NativeError(RuntimeError):
    """A compiled library can't be had; the message is one line that says why."""


@dataclass(frozen=True)
class Recipe:
    """What one library is made of.

    Attributes:
        name: the first part of the file's name.
        what: what the library is to the user, for messages ("the compiled solvers").
        sources: files to compile.
        headers: files the sources include that belong to us; hashed, not compiled.
        flags: for the compiler, before the sources.
        libraries: for the linker, after the sources.
        depends: further text the library depends on, such as another package's version.
    """

    name: str
    what: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()


def build(recipe: Recipe) -> Path:
    """Path of the library; compiles it unless the cache has it. Raises NativeError."""
    compiler = find_compiler()
    target = cache_folder() / f"{recipe.name}-{_digest(compiler, recipe)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, recipe, target)
    except OSError as error:
        raise NativeError(f"no cache folder for {recipe.what}: {error}") from error
    return target


def find_compiler() -> list[str]:
    """The C++ compiler as the words of a command: CXX, else the first of g++, c++, clang++ that is
    on the PATH. Raises NativeError."""
    asked = os.environ.get("CXX")
    for command in [asked] if asked else ["g++", "c++", "clang++"]:
        words = shlex.split(command)
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    if asked:
        raise NativeError(f"the C++ compiler that CXX names, {asked!r}, is not there")
    raise NativeError("there is no C++ compiler (g++, c++ or clang++); install one or set CXX")


def cache_folder() -> Path:
    """The user's cache folder of this package; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megatron_memo"
    except RuntimeError:  # a user without a home folder
        return Path(tempfile.gettempdir()) / f"megatron_memo-{os.getuid()}"


def _digest(compiler: list[str], recipe: Recipe) -> str:
    digest = hashlib.sha256()
    binary = os.stat(compiler[0])
    texts = (*compiler, *recipe.flags, *recipe.libraries, *recipe.depends)
    for part in (*texts, platform.machine(), binary.st_size, binary.st_mtime_ns):
        digest.update(f"{part}\0".encode())
    for source in (*recipe.sources, *recipe.headers):
        digest.update(f"{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], recipe: Recipe, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        result = Path(folder) / target.name
        sources = map(str, recipe.sources)
        command = [*compiler, *recipe.flags, "-o", str(result), *sources, *recipe.libraries]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "")
            raise NativeError(f"{compiler[0]} failed: {first[:300]}") from error
        except subprocess.TimeoutExpired as error:
            raise NativeError(f"{compiler[0]} took longer than {BUILD_SECONDS} s") from error
        if not result.exists():
            raise NativeError(f"{compiler[0]} wrote no library and said nothing; is it a compiler?")
        os.replace(result, target)
