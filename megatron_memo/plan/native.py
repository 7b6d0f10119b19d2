"""Builds and loads the compiled solvers: plain g++, C ABI, ctypes.

The library is built at first use (a few seconds) and kept in the user's cache folder under a name
that hashes sources, flags and compiler, so an update of any of them builds anew. A file lock keeps
processes that start together from building it twice. Without a compiler everything still works
through the Python references, slower; `library()` then returns None and `why_not()` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
BUILD_SECONDS = 300

INT32 = ctypes.POINTER(ctypes.c_int32)
INT64 = ctypes.POINTER(ctypes.c_int64)
DOUBLE = ctypes.POINTER(ctypes.c_double)


class NativeError(RuntimeError):
    """The compiled solvers can't be had; the message is one line that says why."""


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("MEGATRON_MEMO_NO_NATIVE", "0") not in ("", "0"):
        return None, "MEGATRON_MEMO_NO_NATIVE is set"
    try:
        return _declare(ctypes.CDLL(str(build()))), ""
    except NativeError as error:
        return None, str(error)
    except OSError as error:
        return None, f"the compiled library can't be loaded: {error}"


def library() -> ctypes.CDLL | None:
    """The compiled solvers, built if need be, or None."""
    return _load()[0]


def why_not() -> str:
    """Why `library()` is None; empty when it is not."""
    return _load()[1]


def build() -> Path:
    """Path of the library; compiles it unless the cache has it. Raises NativeError."""
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.cc"))
    target = _cache_folder() / f"plan-{_digest(compiler, sources)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, sources, target)
    except OSError as error:
        raise NativeError(f"no cache folder for the compiled solvers: {error}") from error
    return target


def _compiler() -> list[str]:
    asked = os.environ.get("CXX")
    for command in [asked] if asked else ["g++", "c++", "clang++"]:
        words = shlex.split(command)
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    if asked:
        raise NativeError(f"the C++ compiler that CXX names, {asked!r}, is not there")
    raise NativeError("there is no C++ compiler (g++, c++ or clang++); install one or set CXX")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megatron_memo"
    except RuntimeError:  # a user without a home folder
        return Path(tempfile.gettempdir()) / f"megatron_memo-{os.getuid()}"


def _digest(compiler: list[str], sources: list[Path]) -> str:
    digest = hashlib.sha256()
    binary = os.stat(compiler[0])
    for part in (*compiler, *FLAGS, platform.machine(), binary.st_size, binary.st_mtime_ns):
        digest.update(f"{part}\0".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], sources: list[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        result = Path(folder) / target.name
        command = [*compiler, *FLAGS, "-o", str(result), *map(str, sources)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "")
            raise NativeError(f"{compiler[0]} failed: {first[:300]}") from error
        except subprocess.TimeoutExpired as error:
            raise NativeError(f"{compiler[0]} took longer than {BUILD_SECONDS} s") from error
        os.replace(result, target)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.memo_canonical_new.restype = ctypes.c_void_p
    lib.memo_canonical_new.argtypes = [
        *(ctypes.c_int32, INT32, INT32, INT64, DOUBLE),
        *(ctypes.c_int64, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64),
    ]
    lib.memo_canonical_free.restype = None
    lib.memo_canonical_free.argtypes = [ctypes.c_void_p]
    lib.memo_canonical_run.restype = ctypes.c_int32
    lib.memo_canonical_run.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_double),
        *(INT32, INT64, INT64),
    ]
    lib.memo_greedy_place.restype = ctypes.c_int64
    lib.memo_greedy_place.argtypes = [
        *(ctypes.c_int32, INT32, INT32, INT64, INT32),
        *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, INT32, INT64),
    ]
    lib.memo_greedy_skyline.restype = ctypes.c_int64
    lib.memo_greedy_skyline.argtypes = [
        *(ctypes.c_int32, INT32, INT32, INT64),
        *(ctypes.c_int64, INT32, INT64),
    ]
    return lib


class StopFlag:
    """A flag that Python sets and compiled code reads."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)

    def set(self) -> None:
        self._value.value = 1

    def __bool__(self) -> bool:
        return self._value.value != 0

    @property
    def pointer(self) -> Any:
        return ctypes.byref(self._value)


def pointer(values: array[int] | array[float]) -> Any:
    """The values of an array as a C pointer of its type; the array must outlive the call."""
    kind: Any = {"i": INT32, "q": INT64, "d": DOUBLE}[values.typecode]
    return ctypes.cast(values.buffer_info()[0], kind)
