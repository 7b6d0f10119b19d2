"""The core alone, without torch, and programs compiled from the tests' own sources."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

from megatron_memo import native_build
from megatron_memo.allocator import build, library
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import DEFAULT_FILTER, Allocator, get_allocator

HERE = Path(__file__).parent
CORE = build.CSRC / "core"
WARNINGS = ("-Wall", "-Wextra")

U64, INT, SIZE = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t
ALONE = {
    "alone_reset": ([], None),
    "alone_arena": ([U64], INT),
    "alone_base": ([], U64),
    "alone_malloc": ([U64, U64], U64),
    "alone_malloc_on_thread": ([U64, U64, INT], U64),
    "alone_free": ([U64], INT),
    "alone_use": ([U64, U64], INT),
    "alone_break_streams": ([INT, INT], None),
    "alone_stream_log": ([INT, ctypes.c_void_p, SIZE], SIZE),
    "alone_block_around": ([U64, ctypes.c_void_p, ctypes.c_void_p], INT),
    "alone_out_of_memory": ([U64, U64, ctypes.c_char_p, SIZE], None),
}


def compiled(name, source, *flags):
    """Path of a shared library or a program made from a source of this folder and the core."""
    try:
        return native_build.build(
            native_build.Recipe(
                name=f"test-{name}",
                what="the allocator's tests",
                sources=(HERE / source,),
                headers=(*sorted(CORE.glob("*.h")), *sorted((HERE / source).parent.glob("*.h"))),
                flags=("-std=c++17", "-O2", "-g1", "-pthread", *WARNINGS, f"-I{CORE}", *flags),
            )
        )
    except native_build.NativeError as error:
        if "there is no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def compile_program():
    return compiled


class Alone(Allocator):
    """The face over the core alone, with what the tests look at."""

    def __init__(self, loaded):
        super().__init__(loaded)
        self.raw = loaded

    def _reserve(self, size, stats):
        assert self.raw.alone_arena(size)

    def malloc(self, size, stream=0):
        return self.raw.alone_malloc(size, stream)

    def free(self, *addresses):
        freed = [self.raw.alone_free(address) for address in addresses]
        return all(freed)

    def offset(self, address):
        """In the arena; None for a native block."""
        offset = address - self.raw.alone_base()
        return offset if 0 <= offset < self.stats().arena_size else None

    def ask(self, *sizes, stream=0):
        """Requests one after the other, none freed; their offsets, None for native ones."""
        return [self.offset(self.malloc(size, stream)) for size in sizes]

    def stream_log(self, which):
        room = np.zeros(64, np.uint64)
        count = self.raw.alone_stream_log(which, room.ctypes.data, len(room))
        return room[:count].tolist()


@pytest.fixture(scope="session")
def alone_library():
    return library.load(compiled("alone", "core_alone.cpp", "-fPIC", "-shared"), ALONE)


@pytest.fixture
def alone(alone_library):
    alone_library.alone_reset()
    return Alone(alone_library)


@pytest.fixture
def allocator():
    """The CPU's allocator in this process, off and without limits before and after."""
    try:
        installed = get_allocator("cpu")
    except AllocatorError as error:
        if "there is no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    set_back(installed)
    yield installed
    set_back(installed)


def set_back(installed):
    installed.set_budget(None)
    installed.off()
    installed.end_iteration()
    if installed.stats().arena_blocks:
        gc.collect()
    assert installed.stats().arena_blocks == 0, "a test kept planned tensors alive"
    installed.set_filter(DEFAULT_FILTER)
    installed.reset_stats()
