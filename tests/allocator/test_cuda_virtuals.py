"""No virtual of torch's CUDA allocator is left to torch's default; by the compiler's class dump."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_memo import native_build
from megatron_memo.allocator.build import CSRC
from megatron_memo.allocator.cuda_headers import include_flags
from megatron_memo.allocator.errors import AllocatorError

HEADER = CSRC / "cuda" / "forwarding.h"
CLASS = "memo::ForwardingAllocator"
BASES = ("c10::Allocator", "c10::DeviceAllocator", "c10::cuda::CUDACachingAllocator::CUDAAllocator")
USED = "memo::ForwardingAllocator wrap(memo::cca::get());\n"


def entries(folder, header):
    """Entries of the class's virtual table, as the compiler names them."""
    torch_folder = Path(torch.__file__).parent
    try:
        includes = include_flags(torch_folder, torch.version.cuda)
        compiler = native_build.find_compiler()
    except (AllocatorError, native_build.NativeError) as error:
        pytest.skip(str(error))
    command = [*compiler, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip(f"{compiler[0]} is not GCC, which alone dumps classes")
    source = folder / "dump.cpp"
    source.write_text(f'#include "{header}"\n{USED}')
    flags = ["-std=c++20", "-fsyntax-only", "-fdump-lang-class"]
    torch_headers = ["-isystem", str(torch_folder / "include")]
    subprocess.run(
        [*compiler, *flags, *torch_headers, *includes, str(source)],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (dump,) = folder.glob("*.class")
    tables = dump.read_text().split("\nVtable for ")
    (table,) = [t for t in tables if t.splitlines()[0].strip() == CLASS]
    return re.findall(
        r"^\d+ +\(int \(\*\)\(\.\.\.\)\)([a-z_][\w:~]+)$", table.split("\n\n")[0], re.M
    )


def test_every_virtual_is_forwarded(tmp_path):
    found = entries(tmp_path, HEADER)
    assert len(found) > 45
    assert [entry for entry in found if not entry.startswith(f"{CLASS}::")] == []


def test_virtuals_that_are_left_out_are_found(tmp_path):
    """Of those that torch answers itself; without a pure one it would not compile."""
    left_out = {"isHistoryEnabled", "getMemoryInfo", "is_simple_data_ptr"}
    text = HEADER.read_text()
    for method in left_out:
        text, count = re.subn(rf"  [^\n]*\b{method}\([^}}]*}}\n", "", text, count=1)
        assert count == 1
    copy = tmp_path / "forwarding.h"
    copy.write_text(text)
    left = [entry for entry in entries(tmp_path, copy) if not entry.startswith(f"{CLASS}::")]
    assert {entry.rpartition("::")[2] for entry in left} == left_out
    assert all(entry.rpartition("::")[0] in BASES for entry in left)
