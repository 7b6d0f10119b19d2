"""Where the headers of the CUDA runtime are that torch was built with."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_memo.allocator.errors import AllocatorError

SYSTEM = Path("/usr/local/cuda")  # where the toolkit is installed by default
_HEADER = "cuda_runtime_api.h"
_PART = Path("crt") / "host_defines.h"  # which that header includes


def include_flags(torch_folder: Path, cuda: str | None) -> tuple[str, ...]:
    """Flags for the compiler.

    Args:
        torch_folder: of the installed torch package.
        cuda: `torch.version.cuda`.

    Raises:
        AllocatorError: torch was built without CUDA, or no headers of that CUDA are installed.
    """
    if cuda is None or not (torch_folder / "include" / "c10" / "cuda").is_dir():
        raise AllocatorError(f"torch in {torch_folder} was built without CUDA")
    major = cuda.split(".")[0]
    for folder in _candidates(torch_folder.parent, major):
        if _major(folder / _HEADER) == major:
            parts = folder if (folder / _PART).exists() else _from_triton()
            if parts is not None:
                return ("-isystem", str(folder), "-idirafter", str(parts))
    raise AllocatorError(
        f"the planned allocator can't be built: no {_HEADER} of CUDA {major}; install the CUDA "
        "toolkit and set CUDA_HOME, or pip install the nvidia-cuda-runtime that torch asks for"
    )


def _candidates(packages: Path, major: str) -> Iterator[Path]:
    """Include folders, the one that came with torch first."""
    yield packages / "nvidia" / f"cu{major}" / "include"
    yield packages / "nvidia" / "cuda_runtime" / "include"  # up to CUDA 12
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), SYSTEM):
        if home:
            yield Path(home) / "include"


def _major(header: Path) -> str | None:
    if not header.exists():
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)\d{3}\b", header.read_text())
    return found and found[1]


def _from_triton() -> Path | None:
    """The runtime's wheel lacks the compiler's part of its headers; triton, which torch brings,
    has them."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    return folder if (folder / _PART).exists() else None
