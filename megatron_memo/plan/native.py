"""Loads the compiled solvers: C ABI, ctypes.

The library is built at first use (a few seconds, see `native_build`). Without a compiler everything
still works through the Python references, slower; `library()` then returns None and `why_not()`
says why.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from functools import cache
from pathlib import Path
from typing import Any

from megatron_memo import native_build
from megatron_memo.native_build import NativeError, Recipe

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")

INT32 = ctypes.POINTER(ctypes.c_int32)
INT64 = ctypes.POINTER(ctypes.c_int64)
DOUBLE = ctypes.POINTER(ctypes.c_double)


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
    sources = tuple(sorted(SOURCES.glob("*.cc")))
    return native_build.build(Recipe("plan", "the compiled solvers", sources, flags=FLAGS))


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
