"""Runs tests of CUDA code without a GPU: torch's real CUDA libraries over a pretended driver.

The stub is a library that is loaded before all others (LD_PRELOAD) and answers the calls of
libc10_cuda and libtorch_cuda to the CUDA runtime and driver; device.h says how. torch's caching
allocator, streams, autograd and our own libraries are the real ones. Only tests can get at it: it
is compiled from this folder, into the cache, by this module.

A file of tests that is marked `gpu` is run in a process of its own, once, and each of its tests is
reported under its name by `outcome`.
"""

import ast
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_memo import native_build
from megatron_memo.allocator.cuda_headers import include_flags
from megatron_memo.allocator.errors import AllocatorError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARK = "MEMO_TEST_STUB_CUDA"  # in the environment of a stubbed process: the stub's path
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
CALLERS = tuple(
    f"lib{name}.so"
    for name in ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
)
CALLED = re.compile(r"(__)?cuda[A-Z]|cublas|cu[A-Z](?!File)")  # runtime, matrix products, driver
FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-Wall")
NOT_SUPPORTED = 801  # cudaErrorNotSupported
RUN_SECONDS = 240


class Counts(NamedTuple):
    """What the stub counted; in the order of device.h."""

    mallocs: int
    frees: int
    launches: int
    stream_waits: int
    event_records: int
    pageable_copies: int
    copies: int
    used_bytes: int


def stub_counts(stub: ctypes.CDLL) -> Counts:
    stub.stub_count.restype = ctypes.c_long
    return Counts(*(stub.stub_count(which) for which in range(len(Counts._fields))))


def stub_here() -> ctypes.CDLL | None:
    """The stub's own controls, in a process that runs on it."""
    return ctypes.CDLL(os.environ[MARK]) if MARK in os.environ else None


@contextmanager
def lateness() -> Iterator[Callable[[torch.cuda.Stream], None]]:
    """late(stream): what the stream is given from now on is done after all else that need not wait
    for it. On a GPU a pause of some tenths of a second, so call it wherever work begins; on the
    stub as late as can be, up to the end of the block.
    """
    stub = stub_here()
    held = set()

    def late(stream: torch.cuda.Stream) -> None:
        if stub is None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
        elif stream.cuda_stream not in held:
            held.add(stream.cuda_stream)
            stub.stub_hold(ctypes.c_void_p(stream.cuda_stream), 1)

    try:
        yield late
    finally:
        for stream in held:
            assert stub is not None
            stub.stub_hold(ctypes.c_void_p(stream), 0)


def names_of_tests(file: Path) -> list[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(file.read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def outcome(file: Path, name: str, settings: str = "") -> None:
    """Fails or skips as the test of that name did under the stub.

    Args:
        file: of tests; run once for each `settings`.
        name: of a test function; all its parameters count.
        settings: for PYTORCH_CUDA_ALLOC_CONF.
    """
    cases, said = _run(file, settings)
    mine = [case for case in cases if case.get("name", "").split("[")[0] == name]
    assert mine, f"{name} has not been run:\n{said}"
    skips = []
    for case in mine:
        for kind in ("failure", "error"):
            for found in case.iter(kind):
                pytest.fail(f"{case.get('name')} under the stub:\n{found.text}", pytrace=False)
        skips += [found.get("message", "") for found in case.iter("skipped")]
    if len(skips) == len(mine):
        pytest.skip(skips[0])


@cache
def _run(file: Path, settings: str) -> tuple[list[ElementTree.Element], str]:
    """What pytest reported, and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = stubbed_python(
            ["-m", "pytest", *options, str(file)], {"PYTORCH_CUDA_ALLOC_CONF": settings}
        )
        said = f"exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
        return (list(ElementTree.parse(report).iter("testcase")) if report.exists() else []), said


def run_script(script: str, variables: Mapping[str, str]) -> str:
    """What a script prints under the stub.

    Args:
        variables: added to the environment.
    """
    done = stubbed_python(["-c", script], variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def stubbed_python(
    arguments: list[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs Python under the stub.

    Args:
        variables: added to the environment.
    """
    stub, management = libraries()
    environment = {**os.environ, "LD_PRELOAD": f"{stub}:{management}", MARK: str(stub), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


def libraries() -> tuple[Path, Path]:
    """The stub, and that of the management library. Skips the test, with the reason, where there
    can be none."""
    torch_folder = Path(torch.__file__).parent
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    if not torch.version.cuda.startswith("13."):
        pytest.skip(f"the stub is written for CUDA 13; this torch has {torch.version.cuda}")
    if shutil.which("nm") is None:
        pytest.skip("there is no nm to list what torch calls")
    try:
        headers = include_flags(torch_folder, torch.version.cuda)
        return _built_stub(torch_folder, headers), _built_management()
    except AllocatorError as error:
        pytest.skip(str(error))
    except native_build.NativeError as error:
        if "there is no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise


@cache
def _built_stub(torch_folder: Path, headers: tuple[str, ...]) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        rest = Path(folder) / "rest.cpp"
        rest.write_text(_the_rest(torch_folder))
        return native_build.build(
            native_build.Recipe(
                name="test-stub-cuda",
                what="the stub of the CUDA driver",
                sources=(*SOURCES, rest),
                headers=tuple(sorted(HERE.glob("*.h"))),
                flags=(*FLAGS, *headers),
                libraries=("-ldl", "-Wl,-soname,libcuda.so.1"),  # whoever opens the driver gets it
            )
        )


@cache
def _built_management() -> Path:
    return native_build.build(
        native_build.Recipe(
            name="test-stub-nvml",
            what="the stub of NVML",
            sources=(HERE / "nvml" / "nvml.cpp",),
            flags=FLAGS,
            libraries=("-Wl,-soname,libnvidia-ml.so.1",),
        )
    )


def _the_rest(torch_folder: Path) -> str:
    """Source of functions that torch names and the stub has not: they must not reach the real
    runtime, which would look for a driver. Matrix products succeed and do nothing; others fail."""
    written = "".join(source.read_text() for source in SOURCES)
    lines = ["#include <cstdio>"]
    for name in sorted(_called(torch_folder)):
        if f" {name}(" in written or f"** {name}(" in written:
            continue
        if name.startswith("cublas"):
            lines.append(f'extern "C" int {name}() {{ return 0; }}')
        elif name not in ("cudaGetErrorName", "cudaGetErrorString"):  # need no driver
            said = f'std::fputs("stub: {name} is not there\\n", stderr)'
            lines.append(f'extern "C" int {name}() {{ return {said}, {NOT_SUPPORTED}; }}')
    return "\n".join(lines) + "\n"


def _called(torch_folder: Path) -> set[str]:
    # Looked up by name, and insisted on, by libc10_cuda.
    header = (torch_folder / "include" / "c10" / "cuda" / "driver_api.h").read_text()
    required = header.split("define C10_LIBCUDA_DRIVER_API_REQUIRED(_)")[-1].split("\n\n")[0]
    names = set(re.findall(r"_\((cu\w+),", required))
    for caller in CALLERS:
        if not (torch_folder / "lib" / caller).exists():
            continue
        command = ["nm", "-D", "--undefined-only", str(torch_folder / "lib" / caller)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            name = line.split()[-1].split("@")[0]
            if CALLED.match(name):
                names.add(name)
    return names
